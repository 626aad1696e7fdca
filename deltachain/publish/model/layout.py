"""Positions of a live tensor's elements in the checkpoint: index arithmetic.

A rank of a sharded trainer holds a *box* of each tensor, and the checkpoint may have several
tensors for one of the model (fused experts), or the same tensor in another order. An element map
takes flat indices into a rank's box to names and flat indices of the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, cast

import numpy as np

from deltachain.errors import UnsupportedModelError
from deltachain.types import Indices, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

NUMBER_BIT: Final = 48
"""Bit between the slot number (above) and the element's index (below) in the tables of a map:
no tensor has 2**48 elements."""
PLACE: Final = (1 << NUMBER_BIT) - 1

RUNS: Final = 1 << 18
"""Largest number of pieces of an anchor's window: each is a row of a part's directory."""

Selection: TypeAlias = slice | Indices


@dataclass(frozen=True, slots=True)
class Box:
    """A rank's block of a tensor, in row-major order; of a flat one, if it is a run of elements."""

    full: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        return cls(shape, (0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_rows(self) -> bool:
        """Whether the elements are also contiguous in the whole tensor."""
        return self.shape[1:] == self.full[1:]

    @property
    def run(self) -> int:
        """Shortest run of elements that are also consecutive in the whole tensor."""
        run = 1
        for full, held in zip(reversed(self.full), reversed(self.shape), strict=True):
            run *= held
            if held != full:
                break
        return run

    def flat(self, local: Indices) -> Indices:
        """Convert ascending indices into the box to ascending indices into the whole tensor."""
        if self.is_rows:
            first = self.offset[0] * math.prod(self.full[1:]) if self.full else 0
            return local + first if first else local
        at = np.zeros_like(local)
        dims = zip(np.unravel_index(local, self.shape), self.offset, self.full, strict=True)
        for coordinate, offset, full in dims:
            at = at * full + (coordinate + offset)
        return at

    def before(self, index: int) -> int:
        """Return the number of elements of the box before an index into the whole tensor."""
        if not self.numel:
            return 0
        count, stride, held = 0, math.prod(self.full), self.numel
        for full, offset, shape in zip(self.full, self.offset, self.shape, strict=True):
            stride, held = stride // full, held // shape
            at, index = divmod(index, stride)
            if not offset <= at < offset + shape:
                return count + held * min(max(at - offset, 0), shape)
            count += (at - offset) * held
        return count + index  # a tensor without dimensions


def blocks(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """Cut a run of elements of a tensor into boxes, in order: two an axis at most, and one more."""
    row = math.prod(shape[1:])
    if len(shape) == 1:
        yield Box(shape, (start,), (stop - start,))
        return
    low, high = -(-start // row), stop // row  # whole rows; none if low is not below high
    ends = [(start, min(stop, low * row)), (max(start, high * row), stop)]
    for number, (first, last) in enumerate(ends[: 1 if low > high else 2]):
        if number and low < high:
            at = (low, *(0 for _ in shape[1:]))
            yield Box(shape, at, (high - low, *shape[1:]))
        if first < last:
            at_row = first // row
            for one in blocks(first - at_row * row, last - at_row * row, shape[1:]):
                yield Box(shape, (at_row, *one.offset), (1, *one.shape))


class ElementRun(NamedTuple):
    """Consecutive elements of a live tensor that are consecutive in the checkpoint."""

    spec: TensorSpec
    start: int  # flat index of the first in the live tensor; unused if there are tables
    at: int  # and in the checkpoint tensor
    numel: int


class AdjacentRuns(NamedTuple):
    """Some elements in one checkpoint tensor; indices of consecutive ones are a range."""

    spec: TensorSpec
    select: Selection
    indices: Indices | range


@dataclass(frozen=True, slots=True, eq=False)
class ElementMap:
    """Mapping from the elements of one live tensor on a rank to those of the checkpoint."""

    box: Box
    slots: tuple[ElementRun, ...]  # ascending by start; they cover the live tensor
    axes: tuple[Indices, ...] | None = None
    """If neighbours are separated, a table for each axis of the live tensor, or one for its flat
    indices: the sum at an element is its slot number, and its index in the slot. Shared by all
    tensors of one shape."""

    @classmethod
    def straight(cls, spec: TensorSpec, box: Box | None = None) -> ElementMap:
        return cls(box or Box.whole(spec.shape), (ElementRun(spec, 0, 0, spec.numel),))

    def all_of(self, spec: TensorSpec) -> slice | None:
        """Return the slice of the box that is one whole checkpoint tensor, in order, if any."""
        run = self.run_of(spec)
        return run[0] if run and run[0].stop - run[0].start == spec.numel else None

    def run_of(self, spec: TensorSpec) -> tuple[slice, int] | None:
        """Return the slice of the box that is one run of a checkpoint tensor, and its index."""
        for slot in self.slots if self.axes is None else ():
            if slot.spec != spec:
                continue
            low, high = self.box.before(slot.start), self.box.before(slot.start + slot.numel)
            if low == high or (not self.box.is_rows and high - low < slot.numel):
                return None
            first = int(self.box.flat(np.array([low]))[0]) + slot.at - slot.start
            return slice(low, high), first
        return None

    def split(self, local: Indices) -> Iterator[tuple[TensorSpec, Selection, Indices]]:
        """Split ascending indices into the box by checkpoint tensor."""
        if self.axes is not None:
            yield from self._look_up(self.axes, local)
            return
        at = self.box.flat(local)
        bounds = [0, at.size]
        if len(self.slots) > 1:
            bounds = [*np.searchsorted(at, [slot.start for slot in self.slots]).tolist(), at.size]
        for slot, low, high in zip(self.slots, bounds, bounds[1:], strict=False):
            if low < high:
                shift = slot.at - slot.start
                mine = at[low:high]
                yield slot.spec, slice(low, high), mine + shift if shift else mine

    def _look_up(
        self, axes: tuple[Indices, ...], local: Indices
    ) -> Iterator[tuple[TensorSpec, Indices, Indices]]:
        places = np.unravel_index(self.box.flat(local), [axis.size for axis in axes])
        codes = sum((axis[at] for axis, at in zip(axes, places, strict=True)), np.zeros_like(local))
        order = np.argsort(codes, kind="stable")
        codes = codes[order]
        numbers = np.arange(len(self.slots) + 1, dtype=np.int64) << NUMBER_BIT
        bounds = np.searchsorted(codes, numbers).tolist()
        for slot, low, high in zip(self.slots, bounds, bounds[1:], strict=False):
            if low < high:
                yield slot.spec, order[low:high], (codes[low:high] & PLACE) + slot.at

    def _ordered(self, axes: tuple[Indices, ...], limit: int) -> Iterator[AdjacentRuns]:
        """Yield windows slot by slot: the coordinates of a slot are a product over the axes."""
        if len(axes) < len(self.box.full):
            everything = np.arange(self.box.numel)
            held = [(axes[0][self.box.flat(everything)], everything)]
        else:
            strides = (math.prod(self.box.shape[n:]) for n in range(1, len(axes) + 1))
            places = zip(axes, self.box.offset, self.box.shape, strides, strict=True)
            held = [(a[at : at + n], np.arange(n) * stride) for a, at, n, stride in places]
        for chosen in product(*(_by_number(*one) for one in held)):
            slot = self.slots[sum(number for number, *_ in chosen)]
            steps = sorted(chosen, key=lambda one: -int(np.diff(one[1]).min(initial=PLACE)))
            shape = [indices.size for _, indices, _ in steps]
            for start in range(0, math.prod(shape), limit):
                numbers = np.arange(start, min(start + limit, math.prod(shape)))
                indices, select = np.full_like(numbers, slot.at), np.zeros_like(numbers)
                for step, at in zip(steps, np.unravel_index(numbers, shape), strict=True):
                    indices += step[1][at]
                    select += step[2][at]
                if (np.diff(indices) < 0).any():  # neither of two axes is the outer one
                    order = np.argsort(indices)
                    indices, select = indices[order], select[order]
                for low, high in pairwise(_cuts(indices, limit)):
                    run: Indices | range = indices[low:high]
                    if run[-1] - run[0] == high - low - 1:
                        run = range(int(run[0]), int(run[-1]) + 1)
                    yield AdjacentRuns(slot.spec, select[low:high], run)

    def _by_block(self, axes: tuple[Indices, ...], limit: int) -> Iterator[AdjacentRuns]:
        """Yield windows of a run of elements of a flat tensor, box after box."""
        (start,), (numel,), done = self.box.offset, self.box.shape, 0
        for box in blocks(start, start + numel, tuple(axis.size for axis in axes)):
            for one in replace(self, box=box)._ordered(axes, limit):
                yield one._replace(select=cast("Indices", one.select) + done)
            done += box.numel

    def windows(self, limit: int) -> Iterator[AdjacentRuns]:
        if self.axes is not None:
            is_flat = len(self.axes) > len(self.box.full)
            yield from (self._by_block if is_flat else self._ordered)(self.axes, limit)
            return
        limit = max(1, min(limit, RUNS * self.box.run))
        for slot in self.slots:
            low = self.box.before(slot.start)
            high = self.box.before(slot.start + slot.numel)
            shift = slot.at - slot.start
            for start in range(low, high, limit):
                stop = min(start + limit, high)
                yield AdjacentRuns(slot.spec, slice(start, stop), self._places(start, stop, shift))

    def _places(self, start: int, stop: int, shift: int) -> Indices | range:
        if not self.box.is_rows:
            return self.box.flat(np.arange(start, stop)) + shift
        first = int(self.box.flat(np.array([start]))[0]) + shift
        return range(first, first + stop - start)


def _by_number(codes: Indices, local: Indices) -> list[tuple[int, Indices, Indices]]:
    """Return the index in the slot and in the box by slot number, along one axis."""
    order = np.argsort(codes)
    codes, local = codes[order], local[order]
    bounds = [0, *(np.flatnonzero(np.diff(codes >> NUMBER_BIT)) + 1).tolist(), codes.size]
    return [
        (int(codes[low]) >> NUMBER_BIT, codes[low:high] & PLACE, local[low:high])
        for low, high in pairwise(bounds)
        if low < high
    ]


def _cuts(indices: Indices, limit: int) -> list[int]:
    """Return bounds of windows of at most ``limit`` elements and ``RUNS`` consecutive pieces."""
    gaps = np.flatnonzero(np.diff(indices) != 1) + 1
    return sorted({indices.size, *range(0, indices.size, limit), *gaps[RUNS - 1 :: RUNS].tolist()})


INSTEAD: Final = "publish checkpoints with `deltachain push`, or an iterator of whole tensors"
"""Hint for trainers with shards of unknown position."""


def local_shard(name: str, tensor: Tensor) -> tuple[Tensor, Box]:
    """Return the local part of a parameter or a buffer, and its box, without communication."""
    if not is_sharded(tensor):
        return tensor, Box.whole(tuple(tensor.shape))
    sharded: Any = tensor
    if isinstance(sharded.placements, range):  # a FlatShard
        run = sharded.placements
        return sharded.to_local(), Box((tensor.numel(),), (run.start,), (len(run),))
    if any(placement.is_partial() for placement in sharded.placements):
        raise UnsupportedModelError(
            f"{name!r} is a partial sum on every rank: no rank has bits of it",
            hint="redistribute it before attaching",
        )
    full, local = tuple(sharded.shape), sharded.to_local()
    if sharded.device_mesh.get_coordinate() is None:  # the tensor is on other ranks
        return local, Box(full, (0,) * len(full), (0,) * len(full))
    rows = [_rows(sharded, dim) for dim in range(len(full))]
    offset = tuple(int(kept[0]) if len(kept) else 0 for kept in rows)
    shape = tuple(len(kept) for kept in rows)
    if any(len(kept) and int(kept[-1] - kept[0]) + 1 != len(kept) for kept in rows):
        raise UnsupportedModelError(
            f"{name!r}: {sharded.placements} gives a rank rows that are not neighbours",
            hint=INSTEAD,
        )
    if tuple(local.shape) != shape:
        raise UnsupportedModelError(
            f"{name!r}: this rank holds {tuple(local.shape)}, {sharded.placements} says {shape}",
            hint="attach and publish between steps, when everything is sharded again",
        )
    return local, Box(full, offset, shape)


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a ``DTensor`` or ``FlatShard``, without importing slow modules."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def local_of(tensor: Tensor) -> Tensor:
    sharded: Any = tensor
    local: Tensor = sharded.to_local() if is_sharded(tensor) else tensor
    return local


def _rows(sharded: Any, dim: int) -> Tensor:  # noqa: ANN401 - a DTensor
    """Return this rank's indices along one dimension, by sharding an ``arange`` equally."""
    import torch  # noqa: PLC0415 - the rest is index arithmetic
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # noqa: PLC0415

    def alike(placement: Any) -> Any:  # noqa: ANN401 - a placement
        if placement.is_replicate() or placement.dim != dim:
            return Replicate()
        factor = getattr(placement, "split_factor", None)  # set by FSDP over tensor parallelism
        return Shard(0) if factor is None else type(placement)(0, split_factor=factor)

    indices = torch.arange(sharded.shape[dim])
    placements = [alike(placement) for placement in sharded.placements]
    # Without a source rank, every rank splits its own copy.
    split = distribute_tensor(indices, sharded.device_mesh, placements, src_data_rank=None)
    return split.to_local().cpu()
