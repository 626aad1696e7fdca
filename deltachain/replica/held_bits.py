"""Bits that a rank holds of a tensor, in the order of the tensor: the old bits of a change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltachain.codec.old_bits import HeldElements, OldBits
from deltachain.kernels import device, host
from deltachain.kernels.protocol import kernels_for
from deltachain.subscribe.targets.live import LiveElements
from deltachain.types import TensorSpec


class _Run(NamedTuple):
    """Elements that are consecutive in the tensor and in its storage.

    Attributes:
        start: Flat index of the first one.
        at: Its position in the storage.
        numel: How many there are.
    """

    start: int
    at: int
    numel: int


def held_elements(places: Sequence[LiveElements], low: int, high: int) -> HeldElements:
    """Return which of the elements ``[low, high)`` a rank holds; no live bits are read.

    Where those that it holds are consecutive, these are returned; else a mask of ``[low, high)``.

    Args:
        places: Live elements of the tensor, at least one, all in that range.
        low: Flat index of the first element.
        high: Flat index after the last one.
    """
    run = _run(places)
    if run is not None:
        return HeldElements(run.start, run.start + run.numel)
    return HeldElements(low, high, _mask(places, low, high))


def host_bits(places: Sequence[LiveElements], spec: TensorSpec, low: int, high: int) -> OldBits:
    """Return the bits of :func:`held_elements` on the host.

    Consecutive ones on the host are the live bits themselves; others are copied to their places.
    """
    run, nothing = _run(places), np.empty(0, spec.bits_dtype)
    if run is not None:
        storage: Any = places[0].storage
        live = storage[run.at : run.at + run.numel]
        return OldBits(host.receive(live, nothing), run.start, shared=True)
    bits = np.zeros(high - low, spec.bits_dtype)
    for place in places:
        here, live = _views(place, bits, low)
        here[...] = host.receive(live, nothing)
    return OldBits(bits, low, _mask(places, low, high))


def device_bits(places: Sequence[LiveElements], elements: HeldElements) -> Tensor:
    """Return ``(n,)`` bits of :func:`held_elements` where the weights are, as signed integers.

    Consecutive ones are the live bits themselves; others are copied to their places, and zeros are
    in the places of elements that are not held.
    """
    run, storage = _run(places), _tensor(places[0].storage)
    if run is not None:
        return storage[run.at : run.at + run.numel]
    bits = torch.zeros(elements.stop - elements.start, dtype=storage.dtype, device=storage.device)
    for place in places:
        here, live = _views(place, bits, elements.start)
        here.copy_(_tensor(live))
    return bits


def _run(places: Sequence[LiveElements]) -> _Run | None:
    """Return the elements of a rank if there is one place and they are consecutive."""
    first, *others = places
    if others:
        return None
    offset, at, dims = first.box
    numel = 1
    for size, there, live in reversed(dims.tolist()):
        if size > 1 and (there, live) != (numel, numel):
            return None
        numel *= size
    return _Run(offset, at, numel)


def _mask(places: Sequence[LiveElements], low: int, high: int) -> npt.NDArray[np.bool_]:
    held = np.zeros(high - low, np.bool_)
    for place in places:
        _views(place, held, low)[0][...] = True
    return held


def _views(place: LiveElements, flat: Any, start: int) -> tuple[Any, Any]:  # noqa: ANN401
    """Return the elements of a place in flat bits that begin at ``start``, and the live ones."""
    offset, at, dims = place.box
    sizes, there, live = dims.T.tolist() if dims.size else ([1], [1], [1])
    return (
        kernels_for(flat).strided(flat, offset - start, sizes, there),
        kernels_for(place.storage).strided(place.storage, at, sizes, live),
    )


def _tensor(bits: Any) -> Tensor:  # noqa: ANN401
    return bits if isinstance(bits, Tensor) else device.receive(bits, torch.empty(0))
