"""Windows, which are elements of a checkpoint tensor, and their places in an engine.

A *window* is a box of any strides in a full, flat checkpoint tensor. Its *place* is the view of a
live parameter, of the same size, that holds these elements. Routing a change means finding its
indices that are in the window, and their positions in the parameter's storage.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from torch import Tensor
from typing_extensions import override

from deltachain.kernels.arrays import WindowPlace
from deltachain.kernels.protocol import LiveBits, kernels_for
from deltachain.kernels.torch_kernels import live_bits, storage_bits
from deltachain.subscribe.targets.tensor_patch import LiveElements
from deltachain.types import StateDigest

HolderKey: TypeAlias = tuple[str, int]
"""The ranks that hold the same elements, and the number of the place among several on this rank."""

BLOCK: Final = 1 << 20  # number of elements of a strided window that are numbered at a time


class Dim(NamedTuple):
    size: int
    there: int
    live: int


@dataclass(frozen=True, slots=True, order=True)
class Window:
    """Elements of a flat tensor: ``offset + sum(i[k] * stride[k])`` for ``i[k] < size[k]``.

    Two ranks that hold the same elements have equal windows, whatever their layouts.
    """

    offset: int  # flat index of the first element
    size: tuple[int, ...]  # size of each dimension; 1 only for a single dimension
    stride: tuple[int, ...]  # stride of each dimension, descending

    @property
    def numel(self) -> int:
        return prod(self.size)


class Placement(LiveElements):
    """A window, and the live view that holds its elements."""

    def __init__(self, live: Tensor, offset: int, stride: tuple[int, ...]) -> None:
        sizes = zip(live.shape, stride, live.stride(), strict=True)
        dims = sorted((Dim(*d) for d in sizes if d[0] != 1), key=lambda d: (-d.there, -d.live))
        if not nested((d.size, d.there) for d in dims) or not nested(
            (d.size, d.live) for d in dims
        ):
            raise ValueError("the view overlaps itself")
        self.dims: tuple[Dim, ...] = _joined(dims)
        self.live = live.detach()
        self.offset = offset
        self.at = int(live.storage_offset())

    @cached_property
    def window(self) -> Window:
        dims = _joined([Dim(d.size, d.there, d.there) for d in self.dims])
        return Window(self.offset, tuple(d.size for d in dims), tuple(d.there for d in dims))

    @property
    def numel(self) -> int:
        return self.live.numel()

    @cached_property
    @override
    def storage(self) -> LiveBits:
        return live_bits(storage_bits(self.live))

    @cached_property
    @override
    def view(self) -> LiveBits:
        return self._strided(self.storage, self.at, [d.live for d in self.dims])

    @property
    def span(self) -> tuple[int, int]:
        """Range of flat indices from the first element to the last."""
        return self.offset, self.offset + 1 + sum((d.size - 1) * d.there for d in self.dims)

    @cached_property
    @override
    def box(self) -> WindowPlace:
        return WindowPlace(self.offset, self.at, np.array(self.dims, np.int64).reshape(-1, 3))

    @override
    def take(self, full: LiveBits, start: int = 0) -> LiveBits:
        return kernels_for(self.storage).receive(self.cut(full, start), self.storage)

    def cut(self, full: LiveBits, start: int = 0) -> LiveBits:
        """Return the window's elements of flat bits from ``start`` on, in the shape of the view."""
        return self._strided(full, self.offset - start, [d.there for d in self.dims])

    def _strided(self, flat: LiveBits, offset: int, stride: list[int]) -> LiveBits:
        shape = [d.size for d in self.dims] or [1]
        return kernels_for(flat).strided(flat, offset, shape, stride or [1])

    @override
    def digest(self, key: tuple[int, int], bits: LiveBits) -> StateDigest:
        kernels, found = kernels_for(bits), StateDigest()
        if self.is_run:
            return kernels.digest(key, kernels.flat(bits), self.offset)
        for block, numbers in self.numbers():
            indices = kernels.receive(numbers, bits)
            found += kernels.digest_at(key, indices, kernels.flat(bits[block]))
        return found

    @property
    def is_run(self) -> bool:
        return len(self.dims) <= 1 and all(d.there == 1 for d in self.dims)

    @override
    def locate(self, indices: LiveBits) -> "tuple[Any, LiveBits]":
        first, last = kernels_for(indices).bounds(indices, *self.span)
        near: Any = indices[first:last]
        if self.is_run:
            scale = self.dims[0].live if self.dims else 1
            scaled = near if scale == 1 else near * scale
            return slice(first, last), scaled + (self.at - self.offset * scale)
        rest: Any = near - self.offset
        position: Any = self.at
        inside: Any = None
        for dim in self.dims:
            coordinate = rest // dim.there if dim.there != 1 else rest
            rest = rest - coordinate * dim.there if dim.there != 1 else rest - rest
            fits = coordinate < dim.size
            inside = fits if inside is None else inside & fits
            position = position + coordinate * dim.live
        inside = inside & (rest == 0)
        mask: Any = indices < 0  # all false
        mask[first:last] = inside
        return mask, position[inside]

    def numbers(self) -> "Iterator[tuple[Any, LiveBits]]":
        """Yield flat indices of all elements by block, with the block's selector in ``view``."""
        if not self.dims:
            yield ..., np.array([self.offset])
            return
        lead, *rest = self.dims
        inner = np.zeros(1, np.int64)
        for dim in rest:
            inner = np.add.outer(inner, np.arange(dim.size) * dim.there).ravel()
        rows = max(1, BLOCK // max(inner.size, 1))
        for start in range(0, lead.size, rows):
            stop = min(start + rows, lead.size)
            outer = self.offset + np.arange(start, stop) * lead.there
            yield slice(start, stop), np.add.outer(outer, inner).ravel()


def nested(dims: Iterable[tuple[int, int]]) -> bool:
    """Return whether no flat index is reached twice by dimensions of these sizes and strides."""
    run = 1
    for stride, size in sorted((stride, size) for size, stride in dims if size > 1):
        if stride < run:
            return False
        run = stride * size
    return True


def _joined(dims: list[Dim]) -> tuple[Dim, ...]:
    """Merge dimensions that are contiguous in both the checkpoint tensor and the live storage."""
    out: list[Dim] = []
    for dim in dims:
        last = out[-1] if out else None
        if last and (last.there, last.live) == (dim.size * dim.there, dim.size * dim.live):
            out[-1] = Dim(last.size * dim.size, dim.there, dim.live)
        else:
            out.append(dim)
    return tuple(out)
