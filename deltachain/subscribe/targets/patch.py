"""What a swap writes into one tensor, and what takes it back.

A patch is computed from live bits while the target is in use, and writes nothing. It exists for
bits on the host (numpy) and for tensors (torch, in :mod:`.scatter`); what the bits are decides
which. Folders are followed without torch: only tensors import it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from deltachain.delta import TensorDelta
from deltachain.format.digest import digest_key
from deltachain.kernels import host
from deltachain.types import StateDigest, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

PEEK: Final = 4096
"""Elements that are looked at first for two that differ; they nearly always tell."""

LiveBits: TypeAlias = "npt.NDArray[Any] | Tensor"
"""Flat bits of a live tensor: unsigned in numpy, signed of the same width in torch."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Patch:
    """New and old bits of the changed elements of one tensor.

    Attributes:
        spec: The tensor.
        indices: ``(nnz,)`` int64 flat indices; ``None`` when every element is written.
        old: Bits before, for taking the patch back; ``None`` where there was no room to keep them.
        new: Bits after.
        change: What it does to the state digest.
    """

    spec: TensorSpec
    indices: LiveBits | None
    old: LiveBits | None
    new: LiveBits
    change: StateDigest

    @property
    def nnz(self) -> int:
        """Elements written."""
        return int(np.prod(self.new.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of memory the arrays take."""
        arrays = (self.indices, self.old, self.new)
        return sum(int(array.nbytes) for array in arrays if array is not None)

    def undo(self) -> Patch:
        """The patch that takes this one back.

        Raises:
            ValueError: The old bits were not kept.
        """
        if self.old is None:
            raise ValueError(f"{self.spec.name}: the old bits were not kept")
        change = StateDigest() - self.change
        return replace(self, old=self.new, new=self.old, change=change)


def prepare(live: LiveBits, delta: TensorDelta) -> Patch:
    """Compute a patch from live bits and a delta; nothing is written."""
    return _on_host(live, delta) if isinstance(live, np.ndarray) else _torch().prepare(live, delta)


def write(live: LiveBits, patch: Patch) -> None:
    """Write a patch into live bits, in place."""
    if not isinstance(live, np.ndarray):
        _torch().write(live, patch)
    elif patch.indices is None:
        live[:] = patch.new
    else:
        host.scatter_(live, np.asarray(patch.indices), np.asarray(patch.new))


def state_of(spec: TensorSpec, live: LiveBits) -> StateDigest:
    """Contribution of live bits to the state digest."""
    if isinstance(live, np.ndarray):
        return host.digest(digest_key(spec), live)
    found: StateDigest = _torch().state_of(spec, live)
    return found


def varied(bits: LiveBits) -> bool:
    """Whether they are not all alike: only such bits show where each of them went."""
    flat: Any = bits.reshape(-1)
    return any(bool((part != flat[:1]).any()) for part in (flat[:PEEK], flat))


def same_bits(one: LiveBits, other: LiveBits) -> bool:
    """Whether two live tensors hold the same bits."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return bool((one == other).all())
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return False
    return one.equal(other)


def _on_host(live: npt.NDArray[Any], delta: TensorDelta) -> Patch:
    key = digest_key(delta.spec)
    if delta.indices is None:
        old, new = live.copy(), delta.values
        change = host.digest(key, new) - host.digest(key, old)
    else:
        old = host.gather(live, delta.indices)
        new = delta.new_bits(old)
        before = host.digest_at(key, delta.indices, old)
        change = host.digest_at(key, delta.indices, new) - before
    return Patch(spec=delta.spec, indices=delta.indices, old=old, new=new, change=change)


def _torch() -> ModuleType:
    """What does the same for tensors; imported where the first tensor comes."""
    from deltachain.subscribe.targets import scatter  # noqa: PLC0415

    return scatter
