"""What a model with LoRA adapters publishes: the adapter alone, or what it makes of its base.

Both are exports (see :meth:`Publisher.attach`) and leave the live model as it is: merging into live
bf16 weights and taking that back changes most of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deltachain.checkpoint import read_assets
from deltachain.errors import ConfigError
from deltachain.names import named_tensors
from deltachain.publish.conversion import as_saved

if TYPE_CHECKING:
    from peft import PeftModel


def adapter_tensors(model: PeftModel, adapter: str = "default") -> Iterator[tuple[str, Tensor]]:
    """The tensors of an adapter, by the names of ``adapter_model.safetensors``.

    Raises:
        ConfigError: The model has no such adapter.
    """
    from peft import get_peft_model_state_dict  # noqa: PLC0415 - whoever has the model has it

    _find(model, adapter)
    state: Mapping[str, Tensor] = get_peft_model_state_dict(model, adapter_name=adapter)
    yield from state.items()


def adapter_assets(model: PeftModel, adapter: str = "default") -> dict[str, bytes]:
    """What else makes an adapter: its configuration.

    Raises:
        ConfigError: The model has no such adapter.
    """
    with tempfile.TemporaryDirectory(prefix="deltachain-adapter-") as scratch:
        _find(model, adapter).save_pretrained(scratch)
        return read_assets(Path(scratch))


def merged_tensors(model: PeftModel, adapter: str = "default") -> Iterator[tuple[str, Tensor]]:
    """The tensors of the base model's checkpoint with the adapter added: ``W + s B A``.

    The sum is taken in fp32 and rounded once, to the dtype of ``W``, into a tensor of its own.

    Raises:
        ConfigError: The model has no such adapter, or it does more than add to linear layers.
    """
    config = _find(model, adapter)
    base: Any = model.get_base_model()
    _refuse_more(config, base, adapter)
    layers = {
        f"{name}.weight": layer
        for name, layer in base.named_modules()
        if adapter in getattr(layer, "lora_A", ())
    }
    seen: set[int] = set()
    for name, tensor in named_tensors(base):
        if ".lora_" in name or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        own = name.replace(".base_layer", "")
        weight = tensor.detach()
        if own in layers:
            with torch.no_grad():
                added = layers[own].get_delta_weight(adapter)
                weight = (weight.float() + added.float()).to(weight.dtype)
        yield from as_saved(base, own, weight)


def _refuse_more(config: Any, base: Any, adapter: str) -> None:  # noqa: ANN401 - of peft
    """Refuse what ``W + s B A`` of linear layers is not all of."""
    wanted = ("use_dora", "lora_bias", "modules_to_save", "target_parameters")
    more = [name for name in wanted if getattr(config, name, None)]
    if any(adapter in getattr(layer, "lora_embedding_A", ()) for layer in base.modules()):
        more.append("an embedding")
    if str(getattr(config, "peft_type", "")).rpartition(".")[2] != "LORA":
        more.append(str(config.peft_type))
    if more:
        raise ConfigError(
            f"adapter {adapter!r} has {', '.join(more)}, which is not merged here",
            hint="publish the adapter by itself (adapter_tensors), or a merged copy of the model",
        )


def _find(model: PeftModel, adapter: str) -> Any:  # noqa: ANN401 - a configuration of peft
    known: Mapping[str, Any] = getattr(model, "peft_config", {})
    if adapter not in known:
        raise ConfigError(f"no adapter {adapter!r}; the model has {sorted(known)}")
    return known[adapter]
