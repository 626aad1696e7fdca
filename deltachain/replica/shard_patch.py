"""What a swap writes at one place of one rank, and what that does to the state digest.

The arithmetic is that of ``patch``; only the coordinates differ. Digests are over elements of the
full checkpoint tensor, writes go to positions in a live storage.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from deltachain.delta import TensorDelta
from deltachain.format.digest import digest_key
from deltachain.kernels import device, host
from deltachain.replica.windows import Placement, on_device_of
from deltachain.subscribe.proof import Effect
from deltachain.subscribe.targets.patch import LiveBits, Patch, prepare, write
from deltachain.types import Indices, StateDigest, TensorSpec


@dataclass(frozen=True, slots=True)
class Placed:
    """A patch of one place.

    Attributes:
        live: What it is written into: the storage, or the whole view when it is dense.
        patch: Old and new bits.
        effect: What it does, in the coordinates of the checkpoint.
        nbytes: Bytes of memory that it takes; dense new bits lie in the spool.
    """

    live: LiveBits
    patch: Patch
    effect: Effect
    nbytes: int


def place_delta(place: Placement, delta: TensorDelta) -> Placed:
    """Compute what a delta writes at one place; nothing is written."""
    if delta.indices is None:
        return _dense(place, delta)
    return _sparse(place, delta, delta.indices)


def copy_delta(copy: npt.NDArray[Any], delta: TensorDelta) -> Placed:
    """Compute what a delta writes into a full copy on the host; nothing is written."""
    patch = prepare(copy, delta)
    written = host.digest(digest_key(delta.spec), delta.values) if delta.is_dense else StateDigest()
    return Placed(copy, patch, Effect(patch.change, written, patch.nnz), patch.nbytes)


def state_at(place: Placement, spec: TensorSpec) -> StateDigest:
    """Contribution of one place's live bits to the state digest."""
    return _digest(place, spec, place.view)


def warm_up(specs: Iterable[TensorSpec]) -> None:
    """Let the host's kernels be compiled for the widths that will come, not in the first pause."""
    for dtype in {spec.dtype for spec in specs}:
        spec = TensorSpec("", dtype, (2,))
        bits = np.zeros(2, spec.bits_dtype)
        indices = np.arange(2)
        delta = TensorDelta(spec=spec, indices=indices, values=np.ones(2, spec.bits_dtype))
        write(bits, prepare(bits, delta))
        write(bits, prepare(bits, TensorDelta.dense(spec, bits.copy())))


def _sparse(place: Placement, delta: TensorDelta, flat: Indices) -> Placed:
    key, kernels = digest_key(delta.spec), _kernels(place)
    indices = on_device_of(place.live, flat)
    selected, positions = place.route(indices)
    picked: Any = indices[selected]
    values: Any = on_device_of(place.live, delta.values)[selected]
    old = kernels.gather(place.storage, positions)
    new = _new_bits(old, values, delta, selected, place)
    change = kernels.digest_at(key, picked, new) - kernels.digest_at(key, picked, old)
    patch = Patch(spec=delta.spec, indices=positions, old=old, new=new, change=change)
    return Placed(place.storage, patch, Effect(change, StateDigest(), patch.nnz), patch.nbytes)


def _new_bits(old: Any, values: Any, delta: TensorDelta, selected: Any, place: Placement) -> Any:  # noqa: ANN401
    mask = delta.absolute
    if mask.ndim == 0:
        return values if bool(mask) else old + values
    if isinstance(old, Tensor):
        return device.new_bits(old, values, on_device_of(place.live, mask)[selected])
    return np.where(mask[selected], values, old + values)


def _dense(place: Placement, delta: TensorDelta) -> Placed:
    view = place.view
    old = view.clone() if isinstance(view, Tensor) else view.copy()
    new = on_device_of(place.live, place.cut(delta.values))
    written = _digest(place, delta.spec, new)
    change = written - _digest(place, delta.spec, old)
    patch = Patch(spec=delta.spec, indices=None, old=old, new=new, change=change)
    kept = int(old.nbytes) + (int(new.nbytes) if isinstance(new, Tensor) else 0)
    return Placed(view, patch, Effect(change, written, place.numel), kept)


def _digest(place: Placement, spec: TensorSpec, bits: Any) -> StateDigest:  # noqa: ANN401
    key, kernels = digest_key(spec), _kernels(place)
    if len(place.dims) <= 1 and all(d.there == 1 for d in place.dims):
        whole: StateDigest = kernels.digest(key, _flat(bits), place.offset)
        return whole
    total = StateDigest()
    for where, numbers in place.numbers():
        total += kernels.digest_at(key, on_device_of(place.live, numbers), _flat(bits[where]))
    return total


def _flat(bits: Any) -> Any:  # noqa: ANN401
    return bits.reshape(-1) if isinstance(bits, Tensor) else np.ascontiguousarray(bits).reshape(-1)


def _kernels(place: Placement) -> Any:  # noqa: ANN401 - two modules with the same functions
    return device if isinstance(place.storage, Tensor) else host
