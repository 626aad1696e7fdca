"""Checkpoint names and wire dtypes of a torch module's weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor, nn

from deltachain.errors import ConfigError

if not hasattr(
    torch, "float8_e8m0fnu"
):  # the newest name that is used; who imports torch comes here
    raise ConfigError(
        f"torch {torch.__version__} is older than 2.7", hint='pip install "torch>=2.7"'
    )

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}
"""torch dtype by wire dtype."""

WIRE_NAMES: Final[dict[torch.dtype, str]] = {dtype: name for name, dtype in TORCH_DTYPES.items()}

WRAPPERS: Final = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Name components inserted by ``torch.compile``, FSDP and activation checkpointing."""


_WRAPPED: Final = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "AveragedModel": "module",
    "_FabricModule": "_original_module",
}
"""Child that is the model, by the class of a wrapper: of torch, Megatron, Lightning Fabric."""


def normalise(name: str) -> str:
    """Remove the name components of wrappers; return the name in the checkpoint."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers, most of which do not forward its attributes."""
    while True:
        kinds = (_WRAPPED.get(kind.__name__, "") for kind in type(model).__mro__)
        inner = getattr(model, next(filter(None, kinds), ""), None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, then persistent buffers; tied tensors under each of their names."""
    model = unwrapped(model)
    kept = {normalise(name) for name in model.state_dict(keep_vars=True)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield normalise(name), parameter
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if normalise(name) in kept:
            yield normalise(name), buffer
