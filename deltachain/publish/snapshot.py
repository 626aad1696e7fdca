"""Snapshot of the last published bits, and the diff against it.

The snapshot is in host memory, pinned if the weights are on an accelerator. Weights on the host are
compared in place by the host kernels, with a fused cast from fp32 master weights. Weights on a
device are compared there: the snapshot is copied over in chunks, and only changes are copied back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
from torch import Tensor

from deltachain.format.digest import digest_key
from deltachain.kernels import device, host, threaded
from deltachain.kernels.crossing import diff_across_
from deltachain.kernels.reference import Changes
from deltachain.publish.diff import Diff, map_changes
from deltachain.publish.model.layout import AdjacentRuns
from deltachain.publish.model.source import ModelTensors, Weight
from deltachain.torch_names import TORCH_DTYPES
from deltachain.types import Bits, StateDigest

WINDOW_NUMEL: Final = 1 << 22
"""Elements digested at a time if they are not consecutive in the checkpoint."""


class Snapshot:
    """Last published bits of all trainable weights.

    ``diff_`` advances the snapshot; ``restore`` reverts that. Not thread-safe.

    Args:
        source: The weights, whose current bits are the initial content.
        on_device: Whether to use the device comparison for weights on the host. For tests.
    """

    def __init__(self, source: ModelTensors, *, on_device: bool = False) -> None:
        self._source = source
        self._on_device = on_device
        self._kept: dict[str, Tensor] = {}
        self._state = StateDigest()
        for weight in source.live_weights():
            bits = wire_bits(weight)
            for window in weight.element_map.windows(WINDOW_NUMEL):
                self._state += digest_window(window, bits)
            if not weight.frozen:
                kept = torch.from_numpy(threaded.copy(bits))
                self._kept[weight.spec.name] = kept.pin_memory() if weight.tensor.is_cuda else kept

    @property
    def state(self) -> StateDigest:
        """Contribution of this rank's snapshot and frozen weights to the state digest."""
        return self._state

    @property
    def kernel(self) -> str:
        """Name of the kernels of the diff, for receipts."""
        on_device = self._on_device or any(w.tensor.is_cuda for w in self._source.weights)
        return "device" if on_device else host.NAME

    def bits(self, weight: Weight) -> Bits:
        """Return the last published flat bits of one weight; must not be modified."""
        kept = self._kept.get(weight.spec.name)
        return wire_bits(weight) if kept is None else _unsigned(kept)

    def diff_(self) -> Diff:
        """Find the changes since the last call, and advance the snapshot: all or nothing."""
        found: dict[str, Changes] = {}
        try:
            for weight in self._source.live_weights():
                kept = self._kept.get(weight.spec.name)
                if kept is None:
                    continue
                changes = self._diff(weight, kept)
                if changes.indices.size:
                    found[weight.spec.name] = changes
            diff = map_changes(found, self._source.weights)
        except BaseException:
            self._put_back(found)
            raise
        self._state += diff.digest
        return diff

    def restore(self, diff: Diff) -> None:
        """Revert an uncommitted diff, so that the next one finds its changes again."""
        self._state -= diff.digest
        self._put_back(diff.live)

    def redo(self, diff: Diff) -> None:
        """Apply a restored diff again, after its commit proved successful."""
        self._state += diff.digest
        for name, changes in diff.live.items():
            host.scatter_(_unsigned(self._kept[name]), changes.indices, changes.new)

    def _put_back(self, live: Mapping[str, Changes]) -> None:
        for name, changes in live.items():
            host.scatter_(_unsigned(self._kept[name]), changes.indices, changes.old)

    def _diff(self, weight: Weight, kept: Tensor) -> Changes:
        tensor, wanted = weight.tensor.detach(), TORCH_DTYPES[weight.spec.dtype]
        if tensor.is_cuda or self._on_device:
            return diff_across_(device.bits_of(kept), tensor.view(-1), wanted)
        snapshot = _unsigned(kept)
        if tensor.dtype == torch.float32 and wanted == torch.bfloat16:
            return host.cast_diff_(snapshot, tensor.view(-1).numpy())
        return host.diff_(snapshot, wire_bits(weight))


def digest_window(window: AdjacentRuns, bits: Bits) -> StateDigest:
    """Compute the state digest of a window; ``bits`` is the rank's whole shard of the tensor."""
    key, mine = digest_key(window.spec), bits[window.select]
    if isinstance(window.indices, range):
        return threaded.digest(key, mine, window.indices.start)
    return host.digest_at(key, window.indices, mine)


def wire_bits(weight: Weight) -> Bits:
    """Return flat bits of a live weight in its wire dtype; shares memory if no cast is needed."""
    tensor, wanted = weight.tensor.detach(), TORCH_DTYPES[weight.spec.dtype]
    if tensor.dtype == torch.float32 and wanted == torch.bfloat16 and not tensor.is_cuda:
        return host.cast_bf16(tensor.view(-1).numpy())
    return _unsigned(device.bits_of(tensor.to(wanted)).cpu())


def _unsigned(bits: Tensor) -> Bits:
    """Return the unsigned numpy view of integer bits on the host."""
    array = bits.numpy()
    return array.view(np.dtype(f"<u{array.itemsize}"))
