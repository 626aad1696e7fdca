"""A delta: the changed elements of tensors between two versions.

A :class:`TensorDelta` gives, for each changed element, either the *step* ``new - old`` of its bits,
wrapping at the element's width, or its *absolute* new bits. The wire format uses steps by default;
steps add up, so deltas can be folded without the weights. Absolute bits need no base.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from deltachain.errors import BaseMismatchError, MalformedError
from deltachain.types import Bits, Indices, TensorSpec

Mask = npt.NDArray[np.bool_]

WINDOW_NBYTES: Final = 8 << 20
"""Bytes of a tensor that are decoded or compared at a time: threads use memory for them again."""

PIECE_NBYTES: Final = 4 * WINDOW_NBYTES
"""Bytes of a tensor that one thread takes: its windows share frames, inflated once."""

STEP: Mask = np.array(False)  # a 0-d mask: every element is a step
ABSOLUTE: Mask = np.array(True)  # a 0-d mask: every element is absolute


class Piece(NamedTuple):
    """Elements ``[low, high)`` of a tensor."""

    spec: TensorSpec
    low: int
    high: int

    def windows(self, nbytes: int = WINDOW_NBYTES) -> "Iterator[Piece]":
        """Cut at multiples of ``nbytes``, where most segments end."""
        step = nbytes // self.spec.itemsize
        for low in range(self.low, max(self.high, self.low + 1), step):  # one of an empty tensor
            yield Piece(self.spec, low, min(low + step, self.high))


def pieces(specs: Iterable[TensorSpec], nbytes: int = PIECE_NBYTES) -> Iterator[Piece]:
    for spec in specs:
        yield from Piece(spec, 0, spec.numel).windows(nbytes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorDelta:
    spec: TensorSpec  # name, dtype and shape of the tensor in the Hugging Face checkpoint
    # Flat, strictly increasing indices, int64 of shape (nnz,); None if the values are of
    # consecutive elements, all of the tensor unless it was read in part.
    indices: Indices | None
    values: Bits  # unsigned integers of the element's width, shape (nnz,)
    # Whether a value is the new bits rather than a step; bool of shape () or (nnz,).
    absolute: Mask = field(default_factory=lambda: STEP)
    start: int = 0  # flat index of the first value where indices is None; otherwise 0

    @classmethod
    def dense(cls, spec: TensorSpec, bits: Bits) -> "TensorDelta":
        return cls(spec=spec, indices=None, values=bits, absolute=ABSOLUTE)

    @classmethod
    def run(cls, spec: TensorSpec, start: int, bits: Bits) -> "TensorDelta":
        return cls(spec=spec, indices=None, values=bits, absolute=ABSOLUTE, start=start)

    @property
    def is_dense(self) -> bool:
        return self.indices is None and self.nnz == self.spec.numel

    def covers(self, low: int, high: int) -> bool:
        inside = self.start <= low and high <= self.start + self.nnz
        return self.indices is None and inside

    def within(self, low: int, high: int) -> "TensorDelta":
        """Return what this gives of the elements ``[low, high)``; arrays are views."""
        if self.indices is None:
            first, last = max(low, self.start), min(high, self.start + self.nnz)
            values = self.values[first - self.start : max(first, last) - self.start]
            return replace(self, values=values, start=first)
        near = _near(self.indices, low, high)
        absolute = self.absolute[near] if self.absolute.ndim else self.absolute
        indices, values = self.indices[near], self.values[near]
        return replace(self, indices=indices, values=values, absolute=absolute)

    @property
    def nnz(self) -> int:
        return int(self.values.size)

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes + (0 if self.indices is None else self.indices.nbytes))

    def validate(self, *, in_part: bool = False) -> "TensorDelta":
        name, spec = self.spec.name, self.spec
        if self.values.dtype != spec.bits_dtype or self.values.ndim != 1:
            raise MalformedError(
                f"{name}: values are {self.values.dtype}{self.values.shape}, "
                f"expected flat {spec.bits_dtype}"
            )
        if self.absolute.shape not in ((), self.values.shape):
            raise MalformedError(f"{name}: the mask has shape {self.absolute.shape}")
        if self.indices is None:
            fits = 0 <= self.start <= spec.numel - self.nnz and self.absolute.all()
            if not fits or not (in_part or self.is_dense):
                raise MalformedError(f"{name}: dense with {self.nnz} of {spec.numel} elements")
            return self
        if self.indices.shape != self.values.shape or self.indices.dtype != np.int64:
            raise MalformedError(f"{name}: {self.indices.shape} indices, {self.nnz} values")
        _check_order(name, self.indices, spec.numel)
        if bool(np.any(~self.absolute & (self.values == 0))):
            raise MalformedError(f"{name}: a step of zero changes nothing")
        return self

    def new_bits(self, old: Bits) -> Bits:
        found: Bits = new_bits(old, self.values, self.absolute)
        return found


def new_bits(old: Any, values: Any, absolute: Any) -> Any:  # noqa: ANN401 - numpy's or torch's arrays
    if absolute.ndim == 0:
        return values if absolute else old + values
    return values + old * ~absolute


def _check_order(name: str, indices: Indices, numel: int) -> None:
    if not indices.size:
        return
    if indices[0] < 0 or indices[-1] >= numel:
        raise MalformedError(f"{name}: index {indices[0]}..{indices[-1]} outside {numel} elements")
    if bool(np.any(indices[1:] <= indices[:-1])):
        raise MalformedError(f"{name}: indices are not strictly increasing")


def fold(older: TensorDelta, newer: TensorDelta) -> TensorDelta:
    """Combine two deltas of a tensor: the result equals applying ``older``, then ``newer``.

    Steps add up index by index and vanish if they cancel; absolute bits replace earlier values; a
    dense delta replaces everything. Exact for every mixture.
    """
    if newer.indices is None:
        return newer
    if older.indices is None:
        values = older.values.copy()
        values[newer.indices] = newer.new_bits(values[newer.indices])
        return TensorDelta.dense(newer.spec, values)
    if older.nnz and newer.nnz and older.indices[-1] < newer.indices[0]:
        indices = np.concatenate([older.indices, newer.indices])
        return _side_by_side(indices, older, newer)
    indices = np.union1d(older.indices, newer.indices)
    at_older = np.searchsorted(indices, older.indices)
    at_newer = np.searchsorted(indices, newer.indices)
    values = np.zeros(indices.size, newer.values.dtype)
    values[at_older] = older.values
    values[at_newer] = newer.new_bits(values[at_newer])
    absolute = np.zeros(indices.size, np.bool_)
    absolute[at_older] = older.absolute
    absolute[at_newer] |= newer.absolute
    if not absolute.any():
        kept = values != 0
        return TensorDelta(spec=newer.spec, indices=indices[kept], values=values[kept])
    return _whole(newer.spec, indices, values, absolute)


def _side_by_side(indices: Indices, first: TensorDelta, second: TensorDelta) -> TensorDelta:
    values = np.concatenate([first.values, second.values])
    if not first.absolute.any() and not second.absolute.any():
        return TensorDelta(spec=second.spec, indices=indices, values=values)
    masks = [np.broadcast_to(one.absolute, one.values.shape) for one in (first, second)]
    return _whole(second.spec, indices, values, np.concatenate(masks))


def _whole(spec: TensorSpec, indices: Indices, values: Bits, absolute: Mask) -> TensorDelta:
    """Normalise: no zero steps, dense if all elements are given, a 0-d mask if uniform."""
    kept = absolute | (values != 0)
    indices, values, absolute = indices[kept], values[kept], absolute[kept]
    if not absolute.all():
        return TensorDelta(spec=spec, indices=indices, values=values, absolute=absolute)
    if indices.size == spec.numel:
        return TensorDelta.dense(spec, values)
    return TensorDelta(spec=spec, indices=indices, values=values, absolute=ABSOLUTE)


def fold_all(deltas: Iterable[TensorDelta]) -> TensorDelta:
    first, *rest = deltas
    for newer in rest:
        first = fold(first, newer)
    return first


def fold_within(deltas: Sequence[TensorDelta], low: int, high: int) -> TensorDelta:
    """Fold deltas of one tensor, oldest first, that were read for the elements ``[low, high)``.

    Equals :func:`fold_all` on these elements; a run of all of them is never turned into indices.
    """
    last = max((n for n, delta in enumerate(deltas) if delta.covers(low, high)), default=None)
    if last is not None and last == len(deltas) - 1:
        return deltas[last]
    if last is None:
        bits = _joined_windows(deltas, low, high)
        if bits is None:
            return fold_all(_sparse(delta) for delta in deltas)
    else:
        at = low - deltas[last].start
        bits = deltas[last].values[at : at + high - low].copy()
        for delta in deltas[last + 1 :]:
            _set(bits, delta, low, high)
    return TensorDelta.run(deltas[0].spec, low, bits)


def _joined_windows(deltas: Sequence[TensorDelta], low: int, high: int) -> Bits | None:
    """Return the bits of ``[low, high)`` if absolute bits give all of them before any step."""
    bits = np.empty(high - low, deltas[0].spec.bits_dtype)
    given = np.zeros(high - low, np.bool_)
    for number, delta in enumerate(deltas):
        if not delta.absolute.all():
            return None
        _set(bits, delta, low, high)
        if delta.indices is None:
            given[max(delta.start - low, 0) : max(delta.start + delta.nnz - low, 0)] = True
        else:
            given[delta.indices[_near(delta.indices, low, high)] - low] = True
        if given.all():
            for newer in deltas[number + 1 :]:
                _set(bits, newer, low, high)
            return bits
    return None


def _set(bits: Bits, delta: TensorDelta, low: int, high: int) -> None:
    if delta.indices is None:
        first, last = max(delta.start, low), min(delta.start + delta.nnz, high)
        if first < last:
            bits[first - low : last - low] = delta.values[first - delta.start : last - delta.start]
        return
    near = _near(delta.indices, low, high)
    at = delta.indices[near] - low
    mask = delta.absolute[near] if delta.absolute.ndim else delta.absolute
    bits[at] = new_bits(bits[at], delta.values[near], mask)


def _near(indices: Indices, low: int, high: int) -> slice:
    return slice(*np.searchsorted(indices, [low, high]).tolist())


def _sparse(delta: TensorDelta) -> TensorDelta:
    if delta.indices is not None or delta.is_dense:
        return delta
    indices = np.arange(delta.start, delta.start + delta.nnz)
    return TensorDelta(spec=delta.spec, indices=indices, values=delta.values, absolute=ABSOLUTE)


def density(nnz: int, numel: int) -> float:
    return nnz / numel if numel else 0.0


def changes(spec: TensorSpec, old: npt.NDArray[Any], new: npt.NDArray[Any]) -> TensorDelta:
    indices = np.flatnonzero(old != new)
    return TensorDelta(spec=spec, indices=indices, values=new[indices] - old[indices])


@dataclass(frozen=True, slots=True, eq=False)
class OldBits:
    """Bits of consecutive elements of a tensor before a change.

    Attributes:
        bits: ``(n,)`` unsigned integers of the element's width.
        start: Flat index of the first one.
        held: ``(n,)`` bool, whether the bits of an element are known; ``None`` if all are.
        shared: Whether the bits are live weights, or others that must not be written.
    """

    bits: Bits
    start: int = 0
    held: npt.NDArray[np.bool_] | None = None
    shared: bool = False

    @property
    def stop(self) -> int:
        """Flat index after the last one."""
        return self.start + int(self.bits.size)

    def after(self, deltas: Sequence[TensorDelta]) -> "OldBits":
        """Return the bits after some deltas: these themselves, unless they are shared."""
        if not deltas:
            return self
        found = replace(self, bits=self.bits.copy(), shared=False) if self.shared else self
        for delta in deltas:
            found._apply_(delta)
        return found

    def _apply_(self, delta: TensorDelta) -> None:
        """Write what a delta gives of these elements; they are then the bits after it."""
        if delta.indices is None:
            first, last = max(delta.start, self.start), min(delta.start + delta.nnz, self.stop)
            if first < last:
                there = slice(first - self.start, last - self.start)
                self.bits[there] = delta.values[first - delta.start : last - delta.start]
                if self.held is not None:
                    self.held[there] = True
            return
        near = slice(*np.searchsorted(delta.indices, [self.start, self.stop]).tolist())
        at = delta.indices[near] - self.start
        absolute = delta.absolute[near] if delta.absolute.ndim else delta.absolute
        self.bits[at] = new_bits(self.bits[at], delta.values[near], absolute)
        if self.held is not None:
            self.held[at] |= absolute


@contextmanager
def bits_are_at_fault(name: str) -> Iterator[None]:
    """Raise :exc:`BaseMismatchError` where an encoding that needs old bits cannot be decoded."""
    try:
        yield
    except MalformedError as exc:
        what = f"{name!r} does not hold the bits before {exc}"
        raise BaseMismatchError(what, tensor=name) from exc
