"""Patches: new bits for elements of one tensor, and the old ones that undo the write.

A patch is computed from live bits while the target is in use; that writes nothing. The elements are
given as :class:`.live.LiveElements`: a whole tensor, or a window of it in an engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from deltachain.delta import TensorDelta
from deltachain.format.digest import digest_key
from deltachain.kernels.move import move_at, write_
from deltachain.kernels.protocol import LiveBits, kernels_for
from deltachain.subscribe.proof import Effect
from deltachain.subscribe.targets.live import LiveElements, WholeTensor
from deltachain.types import StateDigest, TensorSpec

PEEK: Final = 4096
"""Number of elements to compare first in the search for two that differ; nearly always enough."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Patch:
    """New and old bits of the changed elements of one tensor.

    Attributes:
        spec: Spec of the tensor.
        indices: ``(nnz,)`` int64 positions in the live storage, which for a whole tensor are its
            flat indices; ``None`` if every element of the view is written.
        old: Bits before, to undo the write; ``None`` if there was no space to keep them.
        new: Bits after.
        change: Change of the state digest.
        written: State digest of the new bits if every element is written; zero otherwise.
    """

    spec: TensorSpec
    indices: LiveBits | None
    old: LiveBits | None
    new: LiveBits
    change: StateDigest
    written: StateDigest = field(default_factory=StateDigest)

    @property
    def nnz(self) -> int:
        """Number of elements written."""
        return int(np.prod(self.new.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the arrays."""
        arrays = (self.indices, self.old, self.new)
        return sum(int(array.nbytes) for array in arrays if array is not None)

    @property
    def own_nbytes(self) -> int:
        """Bytes of memory of the arrays, except new bits in a read-only view of a mapped file."""
        borrowed = isinstance(self.new, np.ndarray) and not self.new.flags.writeable
        return self.nbytes - (int(self.new.nbytes) if borrowed else 0)

    @property
    def effect(self) -> Effect:
        """Effect of the write on the state digest."""
        return Effect(self.change, self.written, self.nnz)

    def undo(self) -> Patch:
        """Return the patch that undoes this one.

        Raises:
            ValueError: The old bits were not kept.
        """
        if self.old is None:
            raise ValueError(f"{self.spec.name}: the old bits were not kept")
        change = StateDigest() - self.change
        return replace(self, old=self.new, new=self.old, change=change, written=StateDigest())


def prepare(live: LiveElements, delta: TensorDelta) -> Patch:
    """Compute a patch from live elements and a delta of their tensor; nothing is written."""
    storage, key = live.storage, digest_key(delta.spec)
    kernels = kernels_for(storage)
    if delta.indices is None:
        old, new = kernels.copy(live.view), live.take(delta.values, delta.start)
        written = live.digest(key, new)
        change = written - live.digest(key, old)
        return Patch(
            spec=delta.spec, indices=None, old=old, new=new, change=change, written=written
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
    """Compile the host kernels for the widths of some tensors, ahead of the first pause."""
    for dtype in {spec.dtype for spec in specs}:
        spec = TensorSpec("", dtype, (2,))
        bits = np.zeros(2, spec.bits_dtype)
        live, indices = WholeTensor(bits), np.arange(2)
        delta = TensorDelta(spec=spec, indices=indices, values=np.ones(2, spec.bits_dtype))
        write(live, prepare(live, delta))
        write(live, prepare(live, TensorDelta.dense(spec, bits.copy())))
