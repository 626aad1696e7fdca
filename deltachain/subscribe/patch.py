"""What a swap writes into one tensor, and what takes it back.

A patch is computed from live bits while the target is in use, and writes nothing. It exists for
bits on the host (numpy) and on a device (torch); where the bits are decides which.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltachain.delta import TensorDelta
from deltachain.digest import digest_key
from deltachain.kernels import device, host
from deltachain.types import StateDigest, TensorSpec

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
    return _on_device(live, delta) if isinstance(live, Tensor) else _on_host(live, delta)


def write(live: LiveBits, patch: Patch) -> None:
    """Write a patch into live bits, in place."""
    if isinstance(live, Tensor):
        new = _to_device(patch.new, live.device)
        if patch.indices is None:
            live.copy_(new)
        else:
            device.scatter_(live, _to_device(patch.indices, live.device), new)
    elif patch.indices is None:
        live[:] = patch.new
    else:
        host.scatter_(live, np.asarray(patch.indices), np.asarray(patch.new))


def state_of(spec: TensorSpec, live: LiveBits) -> StateDigest:
    """Contribution of live bits to the state digest."""
    key = digest_key(spec)
    return device.digest(key, live) if isinstance(live, Tensor) else host.digest(key, live)


def varied(bits: LiveBits) -> bool:
    """Whether they are not all alike: only such bits show where each of them went."""
    flat: Any = bits.reshape(-1)
    return any(bool((part != flat[:1]).any()) for part in (flat[:PEEK], flat))


def same_bits(one: LiveBits, other: LiveBits) -> bool:
    """Whether two live tensors hold the same bits."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return (
        isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and bool((one == other).all())
    )


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


def _on_device(live: Tensor, delta: TensorDelta) -> Patch:
    key, where = digest_key(delta.spec), live.device
    values = _to_device(delta.values, where)
    if delta.indices is None:
        old = live.clone()
        change = device.digest(key, values) - device.digest(key, old)
        return Patch(spec=delta.spec, indices=None, old=old, new=values, change=change)
    indices = _to_device(delta.indices, where)
    mask = delta.absolute
    absolute = bool(mask) if mask.ndim == 0 else _to_device(mask, where)
    old = device.gather(live, indices)
    new = device.new_bits(old, values, absolute)
    change = device.digest_at(key, indices, new) - device.digest_at(key, indices, old)
    return Patch(spec=delta.spec, indices=indices, old=old, new=new, change=change)


def _to_device(array: LiveBits, where: torch.device) -> Tensor:
    if isinstance(array, Tensor):
        return array.to(where)
    if array.dtype in (np.uint16, np.uint32, np.uint64):
        array = array.view(f"<i{array.itemsize}")
    return torch.from_numpy(np.require(array, requirements="W")).to(where)
