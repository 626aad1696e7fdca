"""The implementations that the kernel contract is run against."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltachain.kernels import batched, device
from deltachain.kernels.crossing import DeviceDiff
from deltachain.kernels.device import pin_
from deltachain.kernels.lane import Compared
from deltachain.kernels.reference import Changes, SplitSteps
from deltachain.kernels.segments import StreamLayout, TensorStreams, pack
from deltachain.types import Bits, Indices, StateDigest


class DeviceArm:
    def __init__(self, where: str) -> None:
        self._where = torch.device(where)

    def diff_(self, snapshot: Bits, current: Bits) -> Changes:
        bits = self.send(snapshot)
        changes = _changes(device.diff_(bits, self.send(current)), snapshot)
        snapshot[:] = _receive(bits, snapshot)
        return changes

    def cast_diff_(self, snapshot: Bits, master: Any) -> Changes:
        bits = self.send(snapshot)
        found = device.cast_diff_(bits, torch.from_numpy(master).to(self._where))
        snapshot[:] = _receive(bits, snapshot)
        return _changes(found, snapshot)

    def decode_gaps(self, gaps: Bits) -> Indices:
        planes = list(gaps.view(np.uint8).reshape(-1, gaps.itemsize).T)
        nnz = int(np.count_nonzero(gaps != np.iinfo(gaps.dtype).max))
        layout = StreamLayout(1, gaps.itemsize, absolute=True)
        segments = np.array([[0, 1 << 20, nnz, gaps.size, 0, 0]])
        values = [np.zeros(nnz, np.uint8)]
        return self._decode(TensorStreams(0, 1 << 20, segments, values, planes), layout)[0]

    def join_steps(self, split: SplitSteps) -> Bits:
        nnz, width = split.negative.size, split.wide.itemsize
        segments = np.array([[0, nnz, nnz, 0, split.magnitude.size, split.wide.size]])
        streams = TensorStreams(
            tensor=0,
            numel=nnz,
            segments=segments,
            planes=list(split.wide.view(np.uint8).reshape(-1, width).T),
            sign=np.packbits(split.negative, bitorder="little"),
            exception=np.packbits(split.exception, bitorder="little"),
            magnitude=split.magnitude,
        )
        values: Bits = self._decode(streams, StreamLayout(width, 0, absolute=False))[1]
        return values.view(split.wide.dtype)

    def _decode(self, streams: TensorStreams, layout: StreamLayout) -> tuple[Indices, Bits]:
        batch = pack(layout, [streams])
        found = batched.decode(batch, batched.upload(batch, self._where))
        batch.check(found.verdicts[0][1].cpu().numpy(), ["w"])
        return found.indices.cpu().numpy(), found.values.cpu().numpy()

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
    def __init__(self, where: str, *, resident: bool = False, fused: bool = False) -> None:
        super().__init__(where)
        self._resident, self.diff = resident, DeviceDiff(self._where, fused=fused)

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


def _changes(found: device.DeviceChanges, like: Bits) -> Changes:
    indices = found.indices.cpu().numpy()
    return Changes(indices, _receive(found.old, like), _receive(found.new, like))
