"""Names and dtypes of a torch module's weights, as its checkpoint has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor, nn

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
"""torch's name of every wire dtype."""

WIRE_NAMES: Final[dict[torch.dtype, str]] = {dtype: name for name, dtype in TORCH_DTYPES.items()}

WRAPPERS: Final = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What compile, FSDP and activation checkpointing put into the middle of names."""


def normalise(name: str) -> str:
    """The checkpoint's name of a parameter, whatever wraps the module it is in."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside ``DistributedDataParallel``, which passes no attribute of it on."""
    while isinstance(inner := getattr(model, "module", None), nn.Module) and (
        type(model).__name__ in ("DistributedDataParallel", "DataParallel")
    ):
        model = inner
    return model


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then persistent buffers; tied ones under every name they have."""
    kept = {normalise(name) for name in model.state_dict(keep_vars=True)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield normalise(name), parameter
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if normalise(name) in kept:
            yield normalise(name), buffer
