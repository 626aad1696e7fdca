"""Layers of a model that engines quantise: linear layers and experts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import torch
from torch import nn

from deltachain.errors import ConfigError
from deltachain.publish.model.conversion import SaveConversion
from deltachain.publish.model.source import ModelTensors
from deltachain.publish.quantise.recipe import FLOATS
from deltachain.publish.quantise.settings import Quantization
from deltachain.torch_names import named_modules, named_tensors, unwrapped
from deltachain.types import TensorSpec

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
    """Refuse layers of which engines compute some as one, and only a part is quantised.

    Args:
        quantised: Names of the layers that are quantised.
        left: Names of the other linear layers and experts.
    """
    groups: dict[str, str] = {}
    for layer in quantised:
        groups.setdefault(_group(layer), layer)
    parts: dict[str, list[str]] = defaultdict(list)
    for layer in sorted(left):
        parts[_group(layer)].append(layer)
    for group, layers in parts.items():
        if group in groups:
            raise ConfigError(
                f"{layers[0]!r} is ignored, {groups[group]!r} is quantised, and vLLM and SGLang "
                f"compute both as one layer, {group}",
                hint="ignore all layers of it, or none",
            )


def computed_with(layer: str) -> str:
    """Return a name of the layers of a module that engines load into one matrix with a layer.

    Layers of several modules, as experts are, have several names.
    """
    parent, dot, name = layer.rpartition(".")
    fused = next((names for names in FUSED if name in names), (name,))
    return f"{parent}{dot}{'+'.join(fused)}"


def _group(layer: str) -> str:
    """Return a name of the layer of an engine that a layer of the checkpoint is in."""
    expert = _EXPERT.fullmatch(layer)
    return expert[1] if expert else computed_with(layer)


WEIGHT: Final = ".weight"

ALREADY: Final = (
    "train the checkpoint that it was made from; quantization= quantises weights of 16 or 32 bits"
)
"""Hint for a model that is quantised already."""


class Layers(msgspec.Struct, frozen=True):
    """Weights of a model by the kind of their layer; names in the checkpoint.

    Attributes:
        linear: Weights of linear layers and of experts.
        embeddings: Weights of embeddings, which no engine takes for linear layers.
        tied: Weights of linear layers that are those of embeddings, whether a checkpoint has them
            or not.
    """

    linear: frozenset[str]
    embeddings: frozenset[str]
    tied: frozenset[str] = frozenset()

    @classmethod
    def joined(cls, found: Sequence[Layers]) -> Layers:
        return cls(
            frozenset(name for one in found for name in one.linear),
            frozenset(name for one in found for name in one.embeddings),
            frozenset(name for one in found for name in one.tied),
        )


class Choice(msgspec.Struct, frozen=True):
    """Names of matrices that are quantised, and of layers that are not, for engines to know."""

    names: frozenset[str]
    ignored: tuple[str, ...]


def layers_of(model: nn.Module, saved: Callable[[str], Iterable[str]]) -> Layers:
    """Find the linear layers, experts and embeddings of a model, which may have no data.

    Experts are the parameters of modules named ``experts``, as in transformers. ``saved`` returns
    the names in the checkpoint of a live weight.
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
    return Layers(
        frozenset(name for live in linear for name in saved(live)),
        frozenset(name for live in embeddings for name in saved(live)),
        frozenset(name for live in tied for name in saved(live)),
    )


def layers_of_source(model: nn.Module, source: ModelTensors) -> Layers:
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
    if kind is None:
        raise ConfigError(
            f"transformers has no model for architectures {names} of config.json",
            hint="attach the model itself, which shows its linear layers",
        )
    if not isinstance(config.get("model_type"), str):
        raise ConfigError(
            "config.json has no model_type",
            hint="attach the model itself, which shows its linear layers",
        )
    made = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model: nn.Module = kind(made)
    return model


def choose(source: ModelTensors, layers: Layers, quantization: Quantization) -> Choice:
    """Choose the matrices of a model that are quantised.

    Refused are weights of another dtype or shape than can be quantised, and layers that engines
    compute as one with others that are left.
    """
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
        raise ConfigError(
            "no linear layer is left to quantise", hint="see `ignore` of the quantization"
        )
    check_fused(
        map(_layer, names), (_layer(s.name) for s in source.specs if s.name in linear - names)
    )
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
