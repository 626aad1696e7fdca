"""Two models held against each other, bit by bit, in every tensor that they have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch import Tensor, nn

NOISE: Final[Mapping[str, str]] = {
    "_tensor_constant0": "vLLM traces each module class of transformers once a process; the trace "
    "of phimoe's rotary embedding leaves this copy of its frequencies on the first model only",
}
"""Last parts of names that :func:`differences` leaves out, and why."""

_HELPERS: Final = ("quant_method", "impl")

_DEPTH: Final = 3


def live(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor with elements that a model has, not copied, tied ones under every name."""
    return {
        path: tensor
        for name, module in model.named_modules(remove_duplicate=False)
        for key, value in _parts(module)
        for path, tensor in _tensors(f"{name}.{key}" if name else key, value, _DEPTH)
        if tensor.numel()
    }


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def differences(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that only one side has, or that differ in shape, dtype or any bit.

    NaNs are equal if their bits are. Left out is :data:`NOISE`, and nothing else.
    """
    return [
        name
        for name in sorted(one.keys() | other.keys())
        if name.rpartition(".")[2] not in NOISE
        and not (name in one and name in other and _same(one[name], other[name]))
    ]


def _same(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    return one.is_meta or torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _parts(module: nn.Module) -> Iterator[tuple[str, object]]:
    apart = ("_parameters", "_buffers", "_modules")
    yield from module._parameters.items()
    yield from module._buffers.items()
    for key, value in vars(module).items():
        if key not in apart:
            yield key, value
        if key in _HELPERS and hasattr(value, "__dict__") and not isinstance(value, nn.Module):
            yield from ((f"{key}.{inner}", held) for inner, held in vars(value).items())


def _tensors(name: str, value: object, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif depth and isinstance(value, list | tuple | dict):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, held in pairs:
            yield from _tensors(f"{name}[{key}]", held, depth - 1)
