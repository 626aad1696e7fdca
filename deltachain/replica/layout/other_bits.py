"""Other bits for checkpoint tensors: what follows them shows where each element goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeAlias

import torch
from torch import Tensor

WeightsFactory: TypeAlias = Callable[[Iterable[str]], Iterable[tuple[str, Tensor]]]
"""Makes checkpoint tensors by their names in the chain, anew each time: loaders edit them."""

LARGE: Final = 64.0
"""Magnitude above which numbers are made smaller, not larger: formats of eight bits end at 240."""


def mixed(
    weights: WeightsFactory, names: Iterable[str], others: Iterable[str], turn: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Checkpoint tensors, some of them with other bits in every element."""
    changed = frozenset(others)
    for name in names:
        for here, tensor in weights([name]):
            yield here, other_bits(tensor, turn) if name in changed else tensor


def other_bits(tensor: Tensor, turn: int = 0) -> Tensor:
    """A tensor of which every element is another, by more than any rounding.

    Equal elements become different, to show where each of them goes. So do those of two turns, 0
    and 1, except booleans: they show which of two equal tensors is stored somewhere.
    """
    if tensor.dtype is torch.bool:
        return ~tensor
    seeded = torch.Generator().manual_seed(tensor.numel())
    power = torch.randint(0, 3, tensor.shape, generator=seeded).to(tensor.device)
    power = (power + turn) % 3
    found = _raised(tensor, power)
    # No row or column is its own mirror image: a loader that turns them over is seen by any of
    # them, also where a rank has few. A corner may have to change twice.
    for dim in (-2, -1, -2, -1):
        if tensor.ndim >= -dim and tensor.shape[dim] > 1:
            last, end = power.select(dim, -1), found.select(dim, -1)
            alike = _plain(found.select(dim, 0)) == _plain(end)
            last.copy_((last + alike) % 3)
            end.copy_(_raised(tensor.select(dim, -1), last))
    return found


def _raised(tensor: Tensor, power: Tensor) -> Tensor:
    """Larger numbers by powers of two, smaller where they are large; integers with other bits."""
    if not tensor.is_floating_point():
        return tensor ^ (1 + power).to(tensor.dtype)
    factor = (2.0 ** (1 + power)).float()
    wide = tensor.float()
    scaled = torch.where(wide.abs() > LARGE, wide / factor, wide * factor)
    return torch.where(wide == 0, factor, scaled).to(tensor.dtype)


def _plain(tensor: Tensor) -> Tensor:
    """Numbers that can be compared: those of eight bits cannot."""
    return tensor.float() if tensor.is_floating_point() else tensor
