"""Exports of a model with LoRA adapters: the adapter alone, or merged into the base.

Both are exports (see :meth:`Publisher.attach`) and leave the live model unchanged: merging into
live bf16 weights and reverting would change most of them.
"""

import copy
import logging
import math
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn

from deltachain.checkpoint import PEFT_PREFIX, read_assets
from deltachain.errors import ConfigError, UnsupportedModelError
from deltachain.publish.model.conversion import SaveConversion
from deltachain.publish.model.flat_shards import refuse_flat
from deltachain.publish.model.refusals import is_of_peft, refuse_overflow
from deltachain.torch_names import WIRE_NAMES, named_modules, named_tensors, unwrapped
from deltachain.types import TensorSpec

if TYPE_CHECKING:
    from peft import PeftModel

logger = logging.getLogger(__name__)

_FACTORS: Final = ("A", "embedding_A")  # ends of the names of a layer's first factors, by adapter

_CHANGES_BASE: Final = ("pissa", "corda", "olora", "loftq", "lora_ga")
"""Starts of the names of initialisations that write to the weights of the base."""

_ALONE: Final = "publish the adapter alone (adapter_tensors), or a merged copy of the model"


def adapter_tensors(model: "PeftModel", adapter: str | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an adapter, with the names of ``adapter_model.safetensors``.

    The only adapter needs no name; an unknown one is a ``ConfigError``, as is a layer that scales
    by something else than the adapter's configuration says.
    """
    from peft import get_peft_model_state_dict  # noqa: PLC0415 - whoever has the model has it

    adapter, config = _find(model, adapter)
    _refuse_other_scale(model, adapter, config)
    state: Mapping[str, Tensor] = get_peft_model_state_dict(model, adapter_name=adapter)
    prefix = PEFT_PREFIX if _is_of_transformers(model) else ""
    for name, tensor in state.items():
        yield prefix + name, tensor


def adapter_assets(model: "PeftModel", adapter: str | None = None) -> dict[str, bytes]:
    """Return the files that ``save_pretrained`` writes for an adapter, without its tensors.

    An adapter whose initialisation changed the base is named in the log.
    """
    name, found = _find(model, adapter)
    start = getattr(found, "init_lora_weights", None)
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        logger.warning(
            "adapter %r fits only the base as PEFT's initialisation %r left it, which is another "
            "one than its files: engines that load both files compute something else; publish "
            "merged_tensors, or the files of save_pretrained with "
            "path_initial_model_for_weight_conversion",
            name,
            start,
        )
    config = copy.copy(found)  # PEFT sets fields while it saves
    mapping = None
    if not _is_of_transformers(model):
        config.inference_mode = True
        if config.task_type is None:
            kind = type(model.get_base_model())
            mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    with tempfile.TemporaryDirectory(prefix="deltachain-adapter-") as scratch:
        config.save_pretrained(scratch, auto_mapping_dict=mapping)
        return read_assets(Path(scratch))


def _is_of_transformers(model: "PeftModel") -> bool:
    """Return whether ``add_adapter`` of transformers made the adapters, with names without prefix.

    A model of PEFT shows the attributes of the model inside: only the model's own count.
    """
    return bool(vars(unwrapped(model)).get("_hf_peft_config_loaded"))


def merged_tensors(model: "PeftModel", adapter: str | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the base model's checkpoint with one adapter merged: ``W + s B A``.

    The sum is computed in fp32 and rounded once, to the dtype of ``W``, into a new tensor. Low-rank
    factors of sharded layers are gathered, one layer at a time. An adapter that does more than add
    to linear layers is a ``ConfigError``.
    """
    adapter, config = _find(model, adapter)
    base: Any = model.get_base_model()
    _refuse_more(config, base, adapter)
    tuned = _tuned(base)
    layers = {
        f"{own}.weight": layer
        for path, layer in tuned.items()
        if adapter in getattr(layer, "lora_A", ()) and (own := _own_name(path, tuned))
    }
    own_tensors = {
        own: tensor
        for name, tensor in named_tensors(base)
        if (own := _own_name(name, tuned)) is not None
    }
    if absent := layers.keys() - own_tensors.keys():
        raise _unmerged(adapter, f"a layer without the weight {min(absent)!r}")
    saving = SaveConversion(base, {name: tuple(t.shape) for name, t in own_tensors.items()})
    seen: dict[int, str] = {}
    for own, tensor in own_tensors.items():
        first = seen.setdefault(id(tensor), own)
        if first != own:
            if first in layers or own in layers:
                raise _unmerged(adapter, f"a layer whose weight {first!r} and {own!r} share")
            continue
        weight = tensor.detach()
        if own in layers:
            weight = _added(own, layers[own], adapter, weight)
        yield from saving.convert({own: weight}).items()


def _tuned(base: nn.Module) -> dict[str, nn.Module]:
    from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: PLC0415 - as above

    modules = {path.removesuffix("."): module for _, path, module in named_modules(base)}
    tuned: dict[str, nn.Module] = {
        path: one for path, one in modules.items() if isinstance(one, BaseTunerLayer)
    }
    for path, module in modules.items():
        if path not in tuned and is_of_peft(module) and _own_name(path, tuned) is not None:
            raise UnsupportedModelError(
                f"{path!r} is a {type(module).__name__} of PEFT, with weights of an adapter "
                "instead of the base's: it is not merged here",
                hint=_ALONE,
            )
    return tuned


def _own_name(name: str, tuned: Collection[str]) -> str | None:
    """Return a name in the base model; ``None`` for parts of adapters, in ``tuned`` layers."""
    kept: list[str] = []
    path = ""
    for word in name.split("."):
        if path not in tuned:
            kept.append(word)
        elif word != "base_layer":
            return None
        path = f"{path}.{word}" if path else word
    return ".".join(kept)


def _added(own: str, layer: Any, adapter: str, weight: Tensor) -> Tensor:  # noqa: ANN401 - of peft
    a: Tensor = layer.lora_A[adapter].weight.detach()
    b: Tensor = layer.lora_B[adapter].weight.detach()
    added: Tensor = layer.scaling[adapter] * (b.float() @ a.float())
    if layer.fan_in_fan_out:
        added = added.T
    merged = weight.float() + added
    refuse_overflow(TensorSpec(own, WIRE_NAMES[weight.dtype], tuple(weight.shape)), merged)
    return merged.to(weight.dtype)


def _refuse_other_scale(model: Any, adapter: str, config: Any) -> None:  # noqa: ANN401 - of peft
    """Refuse layers that scale by something else than the file that followers have says."""
    if not _is_lora(config):
        return
    alphas = {config.lora_alpha, *(getattr(config, "alpha_pattern", None) or {}).values()}
    for name, layer in model.named_modules():
        if not any(adapter in getattr(layer, f"lora_{kind}", ()) for kind in _FACTORS):
            continue
        rank, scale = layer.r[adapter], layer.scaling[adapter]
        per = math.sqrt(rank) if getattr(config, "use_rslora", False) else rank
        if not any(math.isclose(scale, alpha / per, rel_tol=1e-6) for alpha in alphas):
            raise UnsupportedModelError(
                f"{name!r} scales adapter {adapter!r} by {scale:g}, and by its configuration "
                f"(lora_alpha={config.lora_alpha}, rank {rank}) it would be "
                f"{config.lora_alpha / per:g}",
                hint="followers compute the scale from adapter_config.json: set the configuration "
                "or the layers back, or publish the changed adapter to another URL, with a "
                "configuration that describes it",
            )


def _is_lora(config: Any) -> bool:  # noqa: ANN401 - of peft
    return str(getattr(config, "peft_type", "")).rpartition(".")[2] == "LORA"


def _refuse_more(config: Any, base: Any, adapter: str) -> None:  # noqa: ANN401 - of peft
    """Refuse adapters other than ``W + s B A`` of linear layers."""
    if not _is_lora(config):
        raise _unmerged(adapter, str(config.peft_type))
    wanted = (
        "use_dora",
        "lora_bias",
        "modules_to_save",
        "target_parameters",
        "trainable_token_indices",
    )
    more = [name for name in wanted if getattr(config, name, None)]
    for layer in base.modules():
        variant = getattr(layer, "lora_variant", {}).get(adapter)
        if variant is not None:  # PEFT's class of an adapter that computes something else
            more.append(type(variant).__name__)
            break
        if adapter in getattr(layer, "lora_embedding_A", ()):
            more.append("an embedding")
        elif adapter in getattr(layer, "lora_A", ()) and layer.lora_A[adapter].weight.ndim != 2:
            more.append("a convolution")
        if getattr(layer, "merged_adapters", None):
            more.append("been merged into the live weights already")
            break
    if more:
        raise _unmerged(adapter, ", ".join(more))


def _unmerged(adapter: str, more: str) -> ConfigError:
    return UnsupportedModelError(
        f"adapter {adapter!r} has {more}, which is not merged here", hint=_ALONE
    )


def _find(model: "PeftModel", adapter: str | None) -> tuple[str, Any]:
    """Return the name and PEFT's configuration of an adapter.

    Of several none is the obvious one: trainers add a reference adapter, and switch the active one.
    """
    refuse_flat(model)
    known: Mapping[str, Any] = getattr(model, "peft_config", {})
    if adapter is None and len(known) == 1:
        adapter = next(iter(known))
    if adapter is None or adapter not in known:
        wrong = "which adapter" if adapter is None and known else f"no adapter {adapter!r}"
        raise ConfigError(
            f"{wrong}; the model has {sorted(known)}",
            hint="name one of them: adapter_tensors(model, name), merged_tensors(model, name)",
        )
    return adapter, known[adapter]
