"""The implementations that the kernel contract is run against."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltachain.kernels import device
from deltachain.kernels.device import pin_
from deltachain.kernels.device_diff import Compared, DeviceDiff
from deltachain.kernels.reference import Changes
from deltachain.types import Bits, Indices, StateDigest


class DeviceArm:
    def __init__(self, where: str) -> None:
        self._where = torch.device(where)

    def digest(self, key: tuple[int, int], bits: Bits, start: int) -> StateDigest:
        return device.digest(key, self.send(bits), start)

    def digest_at(self, key: tuple[int, int], indices: Indices, bits: Bits) -> StateDigest:
        return device.digest_at(key, torch.from_numpy(indices).to(self._where), self.send(bits))

    def gather(self, weights: Bits, indices: Indices) -> Bits:
        at = torch.from_numpy(indices).to(self._where)
        return _receive(device.gather(self.send(weights), at), weights)

    def scatter_(self, weights: Bits, indices: Indices, bits: Bits) -> None:
        live = self.send(weights)
        device.scatter_(live, torch.from_numpy(indices).to(self._where), self.send(bits))
        weights[:] = _receive(live, weights)

    def send(self, bits: Bits) -> Tensor:
        signed = bits if bits.itemsize == 1 else bits.view(f"<i{bits.itemsize}")
        return torch.from_numpy(signed.copy()).to(self._where)


class CrossingArm(DeviceArm):
    """``kernels.device_diff``, with the snapshot on the host or on the device.

    Args:
        where: Device of the weights.
        resident: Whether the snapshot is there as well.
    """

    def __init__(self, where: str, *, resident: bool = False) -> None:
        super().__init__(where)
        self._resident, self.diff = resident, DeviceDiff(self._where)

    def diff_(self, snapshot: Bits, current: Bits) -> Changes:
        weights = self.send(current)
        return self._diff(snapshot, weights, weights.dtype)

    def cast_diff_(self, snapshot: Bits, master: Any) -> Changes:
        weights = torch.from_numpy(master).to(self._where)
        return self._diff(snapshot, weights, torch.bfloat16)

    def _diff(self, snapshot: Bits, weights: Tensor, dtype: torch.dtype) -> Changes:
        kept = self.send(snapshot) if self._resident else _pinned(snapshot, self._where)
        found: dict[str, Changes] = {}
        self.diff.add(Compared("w", kept, 0, weights, dtype, self._resident))
        self.diff.settle(found)
        if self._resident:
            snapshot[:] = _receive(kept, snapshot)
        empty = np.empty(0, snapshot.dtype)
        return found.get("w", Changes(np.empty(0, np.int64), empty, empty))


def _pinned(snapshot: Bits, where: torch.device) -> Tensor:
    signed = snapshot if snapshot.itemsize == 1 else snapshot.view(f"<i{snapshot.itemsize}")
    tensor = torch.from_numpy(signed)
    if where.type == "cuda":
        assert pin_(tensor)
    return tensor


def _receive(bits: Tensor, like: Bits) -> Bits:
    return bits.cpu().numpy().view(like.dtype)
