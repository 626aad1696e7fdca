"""Where the elements of a checkpoint tensor live in an engine: windows, and their places.

A *window* is a box of any strides in a full, flat checkpoint tensor. Its *place* is where the
engine keeps those elements: a view of a live parameter, of the same size. Routing a change means
finding which of its indices lie in the window, and where in the parameter's storage they then are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from deltachain.kernels.device import INT_DTYPES
from deltachain.subscribe.targets.patch import LiveBits
from deltachain.types import BITS_DTYPES

BLOCK: Final = 1 << 20
"""Elements of a strided window that are numbered at a time."""


class Dim(NamedTuple):
    """One dimension of a window: elements, and the strides there and in the live storage."""

    size: int
    there: int
    live: int


@dataclass(frozen=True, slots=True, order=True)
class Window:
    """Elements of a flat tensor: ``offset + sum(i[k] * stride[k])`` for ``i[k] < size[k]``.

    Two ranks that hold the same elements have equal windows, however each lays them out.

    Attributes:
        offset: Of the first element.
        size: Elements a dimension, none of them 1 unless it is the only one.
        stride: Descending; contiguous dimensions are one.
    """

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.size)


class Placement:
    """A window, and the live view that holds its elements.

    Args:
        live: The view, on any device; written in place, and never replaced.
        offset: Of its first element in the flat checkpoint tensor.
        stride: Of its dimensions there.

    Raises:
        ValueError: Some element of the checkpoint tensor would be at two places of the view, or two
            of its elements at one.
    """

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
        """Which elements of the checkpoint tensor these are."""
        dims = _joined([Dim(d.size, d.there, d.there) for d in self.dims])
        return Window(self.offset, tuple(d.size for d in dims), tuple(d.there for d in dims))

    @property
    def numel(self) -> int:
        """Elements."""
        return self.live.numel()

    @cached_property
    def storage(self) -> LiveBits:
        """Flat bits of the whole storage that the view is in."""
        return storage_bits(self.live)

    @cached_property
    def view(self) -> LiveBits:
        """Bits of the view itself, in the dimensions of :attr:`dims`; in one if there are none."""
        shape, strides = [d.size for d in self.dims] or [1], [d.live for d in self.dims] or [1]
        storage = self.storage
        if isinstance(storage, Tensor):
            return storage.as_strided(shape, strides, self.at)
        return _strided(storage, self.at, shape, strides)

    def cut(self, full: LiveBits) -> LiveBits:
        """The window's elements of a full, flat tensor, in the dimensions of :attr:`view`."""
        shape, strides = [d.size for d in self.dims] or [1], [d.there for d in self.dims] or [1]
        if isinstance(full, Tensor):
            return full.as_strided(shape, strides, full.storage_offset() + self.offset)
        return _strided(full, self.offset, shape, strides)

    def route(self, indices: LiveBits) -> tuple[Any, LiveBits]:
        """Find which indices lie in the window, and where their elements live.

        Args:
            indices: ``(nnz,)`` int64 flat indices into the full tensor, increasing.

        Returns:
            What selects them from ``indices`` (a slice or a mask), and ``(selected,)`` int64
            positions in :attr:`storage`.
        """
        span = 1 + sum((d.size - 1) * d.there for d in self.dims)
        first, last = _bounds(indices, self.offset, self.offset + span)
        near = indices[first:last]
        if len(self.dims) <= 1 and all(d.there == 1 for d in self.dims):
            scale = self.dims[0].live if self.dims else 1
            scaled: Any = near if scale == 1 else near * scale
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
        return _mask(indices, first, last, inside), position[inside]

    def numbers(self) -> Iterator[tuple[Any, LiveBits]]:
        """Flat indices of all elements, block by block, with what selects them from ``view``."""
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
    """Whether every flat index that ``(size, stride)`` pairs reach is reached in one way only."""
    run = 1
    for stride, size in sorted((stride, size) for size, stride in dims if size > 1):
        if stride < run:
            return False
        run = stride * size
    return True


def on_host(live: Tensor) -> bool:
    """Whether numpy works on a tensor's bits; torch does wherever a device has them."""
    return live.device.type == "cpu"


def storage_bits(tensor: Tensor) -> LiveBits:
    """Flat bits of the whole storage behind a tensor; shares its memory."""
    width = tensor.element_size()
    numel = tensor.untyped_storage().nbytes() // width
    bits = torch.as_strided(tensor.detach(), (numel,), (1,), 0).view(INT_DTYPES[width])
    return bits.numpy().view(BITS_DTYPES[width]) if on_host(bits) else bits


def on_device_of(live: Tensor, bits: LiveBits) -> LiveBits:
    """Bits where a live tensor's are: numpy on the host, torch on a device."""
    if on_host(live) or isinstance(bits, Tensor):
        return bits
    signed = np.ascontiguousarray(bits)
    if bits.dtype.kind == "u" and bits.itemsize > 1:
        signed = signed.view(f"<i{bits.itemsize}")
    return torch.from_numpy(np.require(signed, requirements="W")).to(live.device)


def _joined(dims: list[Dim]) -> tuple[Dim, ...]:
    """Dimensions that follow one another without a gap, on both sides, as one."""
    out: list[Dim] = []
    for dim in dims:
        last = out[-1] if out else None
        if last and (last.there, last.live) == (dim.size * dim.there, dim.size * dim.live):
            out[-1] = Dim(last.size * dim.size, dim.there, dim.live)
        else:
            out.append(dim)
    return tuple(out)


def _strided(flat: npt.NDArray[Any], offset: int, shape: list[int], strides: list[int]) -> LiveBits:
    if not prod(shape):
        return np.empty(shape, flat.dtype)
    steps = [stride * flat.itemsize for stride in strides]
    view: LiveBits = as_strided(flat[offset:], shape, steps, writeable=flat.flags.writeable)
    return view


def _bounds(indices: LiveBits, low: int, high: int) -> tuple[int, int]:
    if isinstance(indices, Tensor):
        edges = torch.tensor([low, high], device=indices.device)
        first, last = torch.searchsorted(indices, edges).tolist()
    else:
        first, last = np.searchsorted(indices, [low, high]).tolist()
    return first, last


def _mask(indices: LiveBits, first: int, last: int, inside: Any) -> LiveBits:  # noqa: ANN401
    if isinstance(indices, Tensor):
        mask: Any = torch.zeros(indices.shape, dtype=torch.bool, device=indices.device)
    else:
        mask = np.zeros(indices.shape, np.bool_)
    mask[first:last] = inside
    found: LiveBits = mask
    return found
