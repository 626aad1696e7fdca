"""Patches of live tensors, wherever these are."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deltachain.delta import TensorDelta
from deltachain.format.digest import digest_key
from deltachain.kernels import device
from deltachain.subscribe.targets.patch import LiveBits, Patch
from deltachain.types import StateDigest, TensorSpec


def write(live: Tensor, patch: Patch) -> None:
    """See :func:`deltachain.subscribe.targets.patch.write`."""
    new = _to_device(patch.new, live.device)
    if patch.indices is None:
        live.copy_(new)
    else:
        device.scatter_(live, _to_device(patch.indices, live.device), new)


def state_of(spec: TensorSpec, live: Tensor) -> StateDigest:
    """See :func:`deltachain.subscribe.targets.patch.state_of`."""
    return device.digest(digest_key(spec), live)


def prepare(live: Tensor, delta: TensorDelta) -> Patch:
    """See :func:`deltachain.subscribe.targets.patch.prepare`."""
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
