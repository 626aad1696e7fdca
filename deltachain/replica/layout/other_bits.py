"""Other bits for checkpoint tensors: the changes that they cause show where each element goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeAlias

import torch
from torch import Tensor

WeightsFactory: TypeAlias = Callable[[Iterable[str]], Iterable[tuple[str, Tensor]]]
"""Factory of checkpoint tensors, by chain name; new ones at each call, since loaders edit them."""

LARGE: Final = 64.0
"""Magnitude above which numbers are decreased, not increased: eight-bit formats end at 240."""


def mixed(
    weights: WeightsFactory, names: Iterable[str], others: Iterable[str], turn: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Yield checkpoint tensors, some of them with other bits in every element."""
    changed = frozenset(others)
    for name in names:
        for here, tensor in weights([name]):
            yield here, other_bits(tensor, turn) if name in changed else tensor


def other_bits(tensor: Tensor, turn: int = 0) -> Tensor:
    """Return a tensor in which every element differs from the given one by more than rounding.

    Equal elements become different, to show where each of them goes. The results of turns 0 and 1
    differ too, except booleans, to show which of two equal tensors is stored somewhere.
    """
    if tensor.dtype is torch.bool:
        return ~tensor
    seeded = torch.Generator().manual_seed(tensor.numel())
    power = torch.randint(0, 3, tensor.shape, generator=seeded).to(tensor.device)
    power = (power + turn) % 3
    found = _raised(tensor, power)
    # No row or column is its own mirror image, so each of them reveals a loader that reverses
    # them, even where a rank has few. A corner may have to change twice.
    for dim in (-2, -1, -2, -1):
        if tensor.ndim >= -dim and tensor.shape[dim] > 1:
            last, end = power.select(dim, -1), found.select(dim, -1)
            alike = _plain(found.select(dim, 0)) == _plain(end)
            last.copy_((last + alike) % 3)
            end.copy_(_raised(tensor.select(dim, -1), last))
    return found


def _raised(tensor: Tensor, power: Tensor) -> Tensor:
    """Multiply numbers by powers of two, or divide large ones; give integers other bits."""
    if not tensor.is_floating_point():
        return tensor ^ (1 + power).to(tensor.dtype)
    factor = (2.0 ** (1 + power)).float()
    wide = tensor.float()
    scaled = torch.where(wide.abs() > LARGE, wide / factor, wide * factor)
    return torch.where(wide == 0, factor, scaled).to(tensor.dtype)


def _plain(tensor: Tensor) -> Tensor:
    """Return numbers in a comparable dtype: eight-bit numbers cannot be compared."""
    return tensor.float() if tensor.is_floating_point() else tensor
