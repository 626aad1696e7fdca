"""Patches: new bits for elements of one tensor, and the old ones that undo the write.

A patch is computed from live bits while the target is in use; that writes nothing. The elements are
given as :class:`LiveElements`: a whole tensor, or a window of it in an engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import numpy as np
from typing_extensions import override

from deltachain.codec import ENCODINGS, Change, Part, encode_part
from deltachain.codec.frames import TensorReader
from deltachain.delta import TensorDelta
from deltachain.format.keys import digest_key
from deltachain.kernels import host
from deltachain.kernels.arrays import WindowPlace
from deltachain.kernels.protocol import LiveBits, kernels_for, move_at, write_
from deltachain.subscribe.proof import Effect
from deltachain.types import StateDigest, TensorSpec

HOST_BLOCK: Final = 1 << 17  # elements; twice as many took four times as long

DEVICE_BLOCK: Final = 1 << 23
"""Elements of a block on a device: enough for its memory bandwidth, at most 128 MiB of copies."""


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Both versions of the block being exchanged; either place may hold parts of both."""

    start: int
    stop: int
    before: Any
    after: Any


class Exchange:
    """Staged bits of a whole tensor that change places with the live bits.

    Nothing is copied ahead: afterwards the staged array holds the live bits from before, and a
    second exchange restores them. An exception at any point, also between two copies of a block,
    loses no bit: :meth:`run` continues or reverts from there. Compiled code on the host exchanges a
    tensor in one call, in which no exception is raised.
    """

    def __init__(self, staged: LiveBits) -> None:
        self._staged: Any = staged
        self._done = np.zeros(1, np.int64)  # elements exchanged, unless a block is open
        self._block: _Block | None = None
        if self._is_compiled():  # before the pause, if it was not yet
            none: Any = staged[:0]
            host.exchange_(none, none, self._done, 0)

    def _is_compiled(self) -> bool:
        return isinstance(self._staged, np.ndarray)

    @property
    def staged(self) -> LiveBits:
        """The staged array: new bits before the exchange, old bits after it."""
        found: LiveBits = self._staged
        return found

    def run(self, live: LiveBits, *, back: bool = False) -> None:
        """Exchange all elements of the live bits, or take exchanged ones ``back``; repeatable."""
        bits: Any = live
        end = 0 if back else len(self._staged)
        if self._is_compiled():
            host.exchange_(bits, self._staged, self._done, end)
            return
        while self._block is not None or self._done[0] != end:
            if self._block is None:
                self._block = self._next(bits, int(self._done[0]), end)
            self._finish(bits, self._block, back=back)
            self._block = None

    def _next(self, live: Any, at: int, end: int) -> _Block:  # noqa: ANN401
        copy = kernels_for(live).copy
        size = HOST_BLOCK if isinstance(live, np.ndarray) else DEVICE_BLOCK
        start, stop = (at, min(at + size, end)) if at < end else (max(at - size, end), at)
        mine, other = copy(live[start:stop]), copy(self._staged[start:stop])
        return _Block(start, stop, *((mine, other) if at < end else (other, mine)))

    def _finish(self, live: Any, block: _Block, *, back: bool) -> None:  # noqa: ANN401
        """Write the open block into both places; may be repeated, also in the other direction."""
        overwrite_ = kernels_for(live).overwrite_
        mine, other = (block.before, block.after) if back else (block.after, block.before)
        overwrite_(live[block.start : block.stop], mine)
        overwrite_(self._staged[block.start : block.stop], other)
        self._done[0] = block.start if back else block.stop


class LiveElements(Protocol):
    """Elements of a checkpoint tensor, and the live bits that hold them.

    ``n`` is the number of elements here; ``numel`` is that of the whole tensor.
    """

    @property
    def storage(self) -> LiveBits:
        """Flat live bits that contain the elements, possibly with others between them."""

    @property
    def view(self) -> LiveBits:
        """The ``n`` elements in :attr:`storage`, in one shape of any dimensions and strides."""

    @property
    def box(self) -> WindowPlace:
        """The elements as a box, and their positions in :attr:`storage`."""

    def locate(self, indices: LiveBits) -> tuple[Any, LiveBits]:
        """Select the indices of elements here, and find their positions.

        Args:
            indices: ``(nnz,)`` int64 flat indices into the full tensor, increasing.

        Returns:
            A slice or a mask that selects them from ``indices``, and ``(selected,)`` int64
            positions in :attr:`storage`.
        """

    def take(self, full: LiveBits, start: int = 0) -> LiveBits:
        """Return the ``n`` elements of flat bits on this device, in the view's shape."""

    def digest(self, key: tuple[int, int], bits: LiveBits) -> StateDigest:
        """Return the state digest that the elements would have with these bits, in view shape."""


@dataclass(frozen=True, slots=True, eq=False)
class WholeTensor(LiveElements):
    """All elements of a tensor, in order."""

    bits: LiveBits  # (numel,) live bits

    @property
    def storage(self) -> LiveBits:
        return self.bits

    @property
    def view(self) -> LiveBits:
        return self.bits

    @property
    def box(self) -> WindowPlace:
        return WindowPlace(0, 0, np.array([(len(self.bits), 1, 1)]))

    def locate(self, indices: LiveBits) -> tuple[Any, LiveBits]:
        return slice(None), indices

    @override
    def take(self, full: LiveBits, start: int = 0) -> LiveBits:
        return kernels_for(self.bits).receive(full, self.bits)

    def digest(self, key: tuple[int, int], bits: LiveBits) -> StateDigest:
        return kernels_for(bits).digest(key, bits)


def state_of(spec: TensorSpec, live: LiveElements) -> StateDigest:
    return live.digest(digest_key(spec), live.view)


def sum_states(states: Iterable[StateDigest | None]) -> StateDigest | None:
    """Add up the state digests of tensors; ``None`` if one of them has none."""
    total = StateDigest()
    for state in states:
        if state is None:
            return None
        total += state
    return total


PEEK: Final = 4096  # elements that are first searched for two that differ; nearly always enough


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Patch:
    spec: TensorSpec
    # (nnz,) int64 positions in the live storage, in any order, which for a whole tensor are its
    # flat indices; None if every element of the view is written, or of a file, those from `start`.
    indices: LiveBits | None
    old: LiveBits | None  # bits before; None if they are not kept, or with exchange
    new: LiveBits  # bits after; with exchange, the bits before once the patch is written
    change: StateDigest  # change of the state digest; zero if that of the old bits was not computed
    written: StateDigest = field(default_factory=StateDigest)  # of the new bits if they are all
    exchange: Exchange | None = None  # of new bits with old ones, which needs no copy of these
    back: bool = False  # whether the patch takes the exchange back
    start: int = 0  # flat index of the first element without indices

    @property
    def can_undo(self) -> bool:
        return self.old is not None or self.exchange is not None

    @property
    def nnz(self) -> int:
        return int(np.prod(self.new.shape))

    @property
    def nbytes(self) -> int:
        arrays = (self.indices, self.old, self.new)
        return sum(int(array.nbytes) for array in arrays if array is not None)

    @property
    def own_nbytes(self) -> int:
        """Bytes of memory of the arrays, except new bits in a read-only view of a mapped file."""
        borrowed = isinstance(self.new, np.ndarray) and not self.new.flags.writeable
        return self.nbytes - (int(self.new.nbytes) if borrowed else 0)

    @property
    def effect(self) -> Effect:
        return Effect(self.change, self.written, self.nnz)

    def undo(self) -> Patch:
        change = StateDigest() - self.change
        if self.exchange is not None:
            return replace(self, change=change, written=StateDigest(), back=not self.back)
        if self.old is None:
            raise ValueError(f"{self.spec.name}: the old bits were not kept")
        return replace(self, old=self.new, new=self.old, change=change, written=StateDigest())

    def without_old(self) -> Patch:
        """Return a patch of the same new bits that keeps no old ones; before it is written only."""
        return replace(self, old=None, exchange=None)


def prepare(
    live: LiveElements, delta: TensorDelta, *, base_too: bool | None = True, exchange: bool = False
) -> Patch:
    """Compute a patch from live elements and a delta of their tensor; nothing is written.

    Args:
        live: Live elements.
        delta: Delta of their tensor.
        base_too: Whether to digest the old bits of a dense delta; ``None``: nor the new ones.
        exchange: Whether the patch may write into the delta's values, where memory allows it: then
            a dense patch keeps no copy of the old bits. ``live`` must be flat, and its only place.
    """
    storage, key = live.storage, digest_key(delta.spec)
    kernels = kernels_for(storage)
    if delta.indices is None:
        new = live.take(delta.values, delta.start)
        written = StateDigest() if base_too is None else live.digest(key, new)
        change = written - live.digest(key, live.view) if base_too else StateDigest()
        swapped = Exchange(new) if exchange and _is_writable(new) else None
        return Patch(
            spec=delta.spec,
            indices=None,
            old=None if swapped else kernels.copy(live.view),
            new=new,
            change=change,
            written=written,
            exchange=swapped,
        )
    indices: Any = kernels.receive(delta.indices, storage)
    values: Any = kernels.receive(delta.values, storage)
    selected, positions = live.locate(indices)
    absolute: Any = delta.absolute
    if absolute.ndim:
        absolute = kernels.receive(absolute, storage)[selected]
    moved = move_at(storage, positions, key, indices[selected], values[selected], absolute)
    return Patch(
        spec=delta.spec, indices=positions, old=moved.old, new=moved.new, change=moved.change
    )


def prepare_steps(live: LiveElements, reader: TensorReader) -> Patch:
    """Compute a patch straight from the streams of a tensor; nothing is written.

    Equals :func:`prepare` of the decoded delta, in one pass over the changes.
    """
    storage: Any = live.storage
    encoding = ENCODINGS.get(reader.row.encoding)
    found = encoding.stage(reader, live.box, storage, digest_key(reader.spec))
    return Patch(
        spec=reader.spec,
        indices=found.positions,
        old=found.old,
        new=found.new,
        change=found.added - found.removed,
    )


def write(live: LiveElements, patch: Patch) -> None:
    """Write a patch in place into the live elements it was prepared for, or into a copy of them."""
    storage = live.storage
    receive = kernels_for(storage).receive
    if patch.exchange is not None:
        patch.exchange.run(live.view, back=patch.back)
    elif patch.indices is None:
        write_(live.view, None, receive(patch.new, storage))
    else:
        write_(storage, receive(patch.indices, storage), receive(patch.new, storage))


def _is_writable(bits: LiveBits) -> bool:
    """Return whether an array may be written into; a view of frames or of a file may not."""
    return not isinstance(bits, np.ndarray) or bits.flags.writeable


def varied(bits: LiveBits) -> bool:
    """Return whether two elements differ: only then do bits show where each of them goes."""
    flat: Any = bits.reshape(-1)
    return any(bool((part != flat[:1]).any()) for part in (flat[:PEEK], flat))


def warm_up(specs: Iterable[TensorSpec]) -> None:
    for dtype in {spec.dtype for spec in specs}:
        spec = TensorSpec("", dtype, (2,))
        bits = np.zeros(2, spec.bits_dtype)
        live, indices = WholeTensor(bits), np.arange(2)
        delta = TensorDelta(spec=spec, indices=indices, values=np.ones(2, spec.bits_dtype))
        write(live, prepare(live, delta))
        write(live, prepare(live, TensorDelta.dense(spec, bits.copy())))
        for numel in (2, 1000):  # gaps of one byte, and of two
            spec = TensorSpec("", dtype, (numel,))
            delta = TensorDelta(spec=spec, indices=indices, values=np.ones(2, spec.bits_dtype))
            part = Part.from_bytes(encode_part([Change(delta, StateDigest())]).data)
            prepare(WholeTensor(np.zeros(numel, spec.bits_dtype)), part.read(""))
