"""Checkpoint names and wire dtypes of a torch module's weights."""

from collections.abc import Collection, Iterator
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

WIRE_NAMES: Final[dict[torch.dtype, str]] = {dtype: name for name, dtype in TORCH_DTYPES.items()}

_WRAPPED: Final = {
    ("torch", "DistributedDataParallel"): "module",
    ("torch", "DataParallel"): "module",
    ("torch", "FullyShardedDataParallel"): "_fsdp_wrapped_module",
    ("torch", "OptimizedModule"): "_orig_mod",
    ("torch", "AveragedModel"): "module",
    ("torch", "ActivationWrapper"): "_checkpoint_wrapped_module",
    ("megatron", "DistributedDataParallel"): "module",
    ("megatron", "Float16Module"): "module",
    ("deepspeed", "DeepSpeedEngine"): "module",
    ("lightning", "_FabricModule"): "_original_module",
    ("lightning_fabric", "_FabricModule"): "_original_module",
    ("apex", "DistributedDataParallel"): "module",
}
"""Child that is the model, by package and class of a wrapper; its name is in no checkpoint."""


def _wrapped(module: nn.Module) -> str | None:
    kinds = ((kind.__module__.partition(".")[0], kind.__name__) for kind in type(module).__mro__)
    return next((_WRAPPED[kind] for kind in kinds if kind in _WRAPPED), None)


def unwrapped(model: nn.Module) -> nn.Module:
    while (name := _wrapped(model)) is not None:
        model = getattr(model, name)
    return model


def named_modules(model: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield all modules with their paths in the model and in a checkpoint, ending with a point."""
    paths = {"": ""}
    wrapped: dict[str, str | None] = {}
    for at, module in model.named_modules(remove_duplicate=False):
        above, _, name = at.rpartition(".")
        if at:
            path = paths[above] if wrapped[above] == name else f"{paths[above]}{name}."
            paths[at] = path
        wrapped[at] = _wrapped(module)
        yield f"{at}." if at else "", paths[at], module


def named_tensors(
    model: nn.Module, saved: Collection[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, then persistent buffers; tied tensors under each of their names.

    ``saved``: names in the ``state_dict`` of the model, wrapped or not, if known.
    """
    model = unwrapped(model)
    saved = model.state_dict(keep_vars=True) if saved is None else saved
    modules = list(named_modules(model))
    for _, path, module in modules:
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield path + name, parameter
    for at, path, module in modules:
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if at + name in saved or path + name in saved:  # some wrappers save without theirs
                yield path + name, buffer
