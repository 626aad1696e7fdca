"""Layers that engines quantise, linear ones and experts, and the `config.json` that says so."""

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final, TypeAlias

import msgspec
import torch
from torch import nn

from deltachain.chain.chain import Chain
from deltachain.errors import ChainMismatchError, ConfigError
from deltachain.publish.model.conversion import SaveConversion
from deltachain.publish.model.kept_files import CONFIG_FILE
from deltachain.publish.model.source import ModelTensors, TensorSource
from deltachain.publish.quantise.recipe import FLOATS, Recipe
from deltachain.publish.quantise.settings import Quantization
from deltachain.torch_names import named_modules, named_tensors, unwrapped
from deltachain.types import TensorSpec

logger = logging.getLogger(__name__)

FUSED: Final = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
"""Names of layers of one module that vLLM and SGLang load into one matrix."""

_EXPERT: Final = re.compile(r"(.*\bexperts)\.\d+\..+")
"""Name of a layer of an expert: all experts of a module are one layer of engines."""


def check_fused(quantised: Iterable[str], left: Iterable[str]) -> None:
    """Refuse layers of which engines compute some as one, and only a part is quantised."""
    groups: dict[str, str] = {}
    for layer in quantised:
        groups.setdefault(_group(layer), layer)
    for layer in sorted(left):
        if (group := _group(layer)) in groups:
            raise ConfigError(
                f"{layer!r} is ignored, {groups[group]!r} is quantised, and vLLM and SGLang "
                f"compute both as one layer, {group}",
                hint="ignore all layers of it, or none",
            )


def computed_with(layer: str) -> str:
    """Return a name of the layers of a module that engines load into one matrix with a layer."""
    parent, dot, name = layer.rpartition(".")
    fused = next((names for names in FUSED if name in names), (name,))
    return f"{parent}{dot}{'+'.join(fused)}"


def _group(layer: str) -> str:
    expert = _EXPERT.fullmatch(layer)
    return expert[1] if expert else computed_with(layer)


WEIGHT: Final = ".weight"

ALREADY: Final = (
    "train the checkpoint that it was made from; quantization= quantises weights of 16 or 32 bits"
)
"""Hint for a model that is quantised already."""


class Layers(msgspec.Struct, frozen=True):
    linear: frozenset[str]
    embeddings: frozenset[str]
    tied: frozenset[str] = frozenset()

    @classmethod
    def joined(cls, found: "Sequence[Layers]") -> "Layers":
        kinds = zip(*((one.linear, one.embeddings, one.tied) for one in found), strict=True)
        return cls(*(frozenset().union(*kind) for kind in kinds))


class Choice(msgspec.Struct, frozen=True):
    """Names of matrices that are quantised, and of layers that are not, for engines to know."""

    names: frozenset[str]
    ignored: tuple[str, ...]


def layers_of(model: nn.Module, saved: Callable[[str], Iterable[str]]) -> Layers:
    """Find the layers of a model, which may have no data; experts as transformers names them.

    ``saved`` returns the names in the checkpoint of a live weight.
    """
    model = unwrapped(model)
    if getattr(getattr(model, "config", None), "quantization_config", None) is not None:
        raise ConfigError(f"{type(model).__name__} is quantised already", hint=ALREADY)
    linear, embeddings, tied = set[str](), set[str](), set[str]()
    embedded = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    for _, prefix, module in named_modules(model):
        if isinstance(module, nn.Linear):
            (tied if id(module.weight) in embedded else linear).add(f"{prefix}weight")
        elif isinstance(module, nn.Embedding):
            embeddings.add(f"{prefix}weight")
        elif prefix.endswith("experts."):
            parameters = module.named_parameters(recurse=False)
            linear |= {prefix + name for name, tensor in parameters if tensor.ndim > 2}
    kinds = linear, embeddings, tied
    return Layers(*(frozenset(name for live in kind for name in saved(live)) for kind in kinds))


def _layers_of_source(model: nn.Module, source: ModelTensors) -> Layers:
    there = {
        weight.spec.name: [run.spec.name for run in weight.element_map.slots]
        for weight in source.weights
    }
    tied = {alias: there.get(name, []) for alias, name in source.aliases.items()}
    found = layers_of(model, lambda live: there.get(live, []))
    shared = layers_of(model, lambda live: tied.get(live, []))  # an embedding's other names
    embeddings = found.embeddings | shared.embeddings
    return Layers(found.linear, embeddings, found.tied - embeddings)


def layers_of_config(config: Mapping[str, Any]) -> Layers:
    """Find the layers of a checkpoint by making the model of its ``config.json`` without data."""
    if config.get("quantization_config"):
        raise ConfigError("the checkpoint is quantised already", hint=ALREADY)
    model = _without_data(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model)}
    saving = SaveConversion(model, shapes)

    def saved(live: str) -> Iterable[str]:
        if live not in shapes:
            return ()
        try:
            return saving.convert({live: torch.empty(shapes[live], device="meta")})
        except (ValueError, RuntimeError, KeyError, IndexError):  # not by itself
            return [live]

    return layers_of(model, saved)


def _without_data(config: Mapping[str, Any]) -> nn.Module:
    try:
        import transformers  # noqa: PLC0415 - takes seconds
    except ImportError as exc:
        raise ConfigError(
            "transformers, which knows the layers of a checkpoint, is not installed",
            hint="pip install 'deltachain[quantization]'",
        ) from exc
    names = config.get("architectures")
    kind = getattr(transformers, str(names[0]), None) if isinstance(names, list) and names else None
    unknown = f"transformers has no model for architectures {names} of config.json"
    if kind is None or not isinstance(config.get("model_type"), str):
        raise ConfigError(
            unknown if kind is None else "config.json has no model_type",
            hint="attach the model itself, which shows its linear layers",
        )
    with torch.device("meta"):
        model: nn.Module = kind(transformers.AutoConfig.for_model(**config))
    return model


def choose(source: ModelTensors, layers: Layers, quantization: Quantization) -> Choice:
    linear = layers.linear - layers.embeddings - layers.tied
    wanted = [
        spec
        for spec in source.specs
        if spec.name in linear and not quantization.ignores(_layer(spec.name)) and spec.numel
    ]
    for spec in wanted:
        _check(spec)
    names = frozenset(spec.name for spec in wanted)
    if not names:
        hint = "see `ignore` of the quantization"
        raise ConfigError("no linear layer is left to quantise", hint=hint)
    left_linear = [spec.name for spec in source.specs if spec.name in linear - names]
    check_fused(map(_layer, names), map(_layer, left_linear))
    others = [
        spec.name
        for spec in source.specs
        if spec.name not in names | layers.embeddings
        and (spec.name in linear or (spec.name.endswith(WEIGHT) and len(spec.shape) == 2))
    ]
    tied = [
        alias
        for alias, name in source.aliases.items()
        if alias not in layers.embeddings and name in layers.embeddings
    ]
    left = {_layer(name) for name in (*others, *tied, *layers.tied)}
    return Choice(names, tuple(sorted(left)))


def _layer(weight: str) -> str:
    return weight.removesuffix(WEIGHT) if weight.endswith(WEIGHT) else weight.rpartition(".")[0]


def _check(spec: TensorSpec) -> None:
    if spec.dtype not in FLOATS:
        raise ConfigError(f"{spec.name!r} is {spec.dtype}: quantised already", hint=ALREADY)
    if len(spec.shape) != 2 or spec.name.rpartition(".")[2] != "weight":
        raise ConfigError(
            f"{spec.name!r} has shape {spec.shape}: recipes quantise matrices called LAYER.weight",
            hint=f"ignore {_layer(spec.name)!r}, or train a model whose checkpoint has one matrix "
            "an expert",
        )


CONFIG_KEY: Final = "quantization_config"

_VERSIONS: Final = frozenset({"version"})
"""Settings that name the library's release, and nothing that engines compute with."""


def with_quantization(
    assets: Mapping[str, bytes], recipe: Recipe, choice: Choice
) -> dict[str, bytes]:
    if CONFIG_FILE not in assets:
        logger.warning("without config.json, engines cannot load the checkpoint that is published")
        return dict(assets)
    config = read_config(assets)
    if config.get(CONFIG_KEY):
        raise ConfigError(f"{CONFIG_FILE} is of a quantised checkpoint", hint=ALREADY)
    config[CONFIG_KEY] = recipe.arithmetic.config(choice.ignored)
    return {**assets, CONFIG_FILE: json.dumps(config, indent=2).encode()}


def check_config(chain: Chain, files: Callable[[], Mapping[str, bytes]]) -> None:
    """Refuse a quantised checkpoint that is quantised otherwise than the chain's first.

    Its tensors alone do not show that, and engines read the first configuration.
    """
    mine = _quantization(files())
    there = (asset for asset in chain.assets() if asset[0] == CONFIG_FILE)
    theirs = _quantization(dict(islice(there, 1))) if mine else {}  # nor are assets behind it read
    if not mine or not theirs:
        return
    known = (mine.keys() | theirs.keys()) - _VERSIONS
    if differing := sorted(key for key in known if mine.get(key) != theirs.get(key)):
        raise ChainMismatchError(
            f"{CONFIG_KEY} differs from that of the chain at {chain.store.url} in "
            f"{', '.join(map(repr, differing))}",
            hint="engines of this chain read its weights as the first checkpoint's: push this one "
            "to another URL",
        )


def _quantization(files: Mapping[str, bytes]) -> Mapping[str, Any]:
    found = read_config(files).get(CONFIG_KEY) if CONFIG_FILE in files else None
    return found if isinstance(found, dict) else {}


def read_config(assets: Mapping[str, bytes]) -> dict[str, Any]:
    if CONFIG_FILE not in assets:
        raise ConfigError(
            f"no {CONFIG_FILE} shows which layers to quantise",
            hint="give the folder of the checkpoint: assets= of PublishConfig, or what is pushed",
        )
    try:
        config = json.loads(assets[CONFIG_FILE])
    except ValueError as exc:
        raise ConfigError(f"{CONFIG_FILE}: {exc}") from exc
    if not isinstance(config, dict):
        raise ConfigError(f"{CONFIG_FILE} is no JSON object")
    return config


Files: TypeAlias = Callable[[], Mapping[str, bytes]]
"""Function that collects the small files of a checkpoint, by name."""


def find_layers(
    model: nn.Module | TensorSource | None, source: ModelTensors, files: Files
) -> Layers:
    """Find the layers of this rank's weights, of an export by its configuration."""
    if isinstance(model, nn.Module):
        return _layers_of_source(model, source)
    return layers_of_config(read_config(files()))
