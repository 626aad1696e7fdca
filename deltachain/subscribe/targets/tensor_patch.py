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
from deltachain.kernels.arrays import WindowPlace
from deltachain.kernels.protocol import LiveBits, kernels_for, move_at, write_
from deltachain.subscribe.proof import Effect
from deltachain.types import StateDigest, TensorSpec


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
    old: LiveBits | None  # bits before; None if they are not kept
    new: LiveBits  # bits after
    change: StateDigest  # change of the state digest; zero if that of the old bits was not computed
    written: StateDigest = field(default_factory=StateDigest)  # of the new bits if they are all
    start: int = 0  # flat index of the first element without indices

    @property
    def can_undo(self) -> bool:
        return self.old is not None

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
        if self.old is None:
            raise ValueError(f"{self.spec.name}: the old bits were not kept")
        change = StateDigest() - self.change
        return replace(self, old=self.new, new=self.old, change=change, written=StateDigest())

    def without_old(self) -> Patch:
        """Return a patch of the same new bits that keeps no old ones."""
        return replace(self, old=None)


def prepare(live: LiveElements, delta: TensorDelta, *, base_too: bool = True) -> Patch:
    """Compute a patch from live elements and a delta of their tensor; nothing is written.

    Args:
        live: Live elements.
        delta: Delta of their tensor.
        base_too: Whether to compute the digest of the old bits, if every element is written.
    """
    storage, key = live.storage, digest_key(delta.spec)
    kernels = kernels_for(storage)
    if delta.indices is None:
        new = live.take(delta.values, delta.start)
        written = live.digest(key, new)
        change = written - live.digest(key, live.view) if base_too else StateDigest()
        return Patch(
            spec=delta.spec,
            indices=None,
            old=kernels.copy(live.view),
            new=new,
            change=change,
            written=written,
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
    if patch.indices is None:
        write_(live.view, None, receive(patch.new, storage))
    else:
        write_(storage, receive(patch.indices, storage), receive(patch.new, storage))


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
