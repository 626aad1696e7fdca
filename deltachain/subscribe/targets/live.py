"""Live elements of a tensor: all of them in one array, or some in a view of a larger one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from typing_extensions import override

from deltachain.format.digest import digest_key
from deltachain.kernels.protocol import LiveBits, kernels_for
from deltachain.kernels.reference import WindowPlace
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
        """Return the ``n`` elements of flat bits on this device, in the view's shape.

        Args:
            full: Bits of consecutive elements of the tensor, these among them.
            start: Flat index of the first of them.
        """

    def digest(self, key: tuple[int, int], bits: LiveBits) -> StateDigest:
        """Return the state digest that the elements would have with these bits, in view shape."""


@dataclass(frozen=True, slots=True, eq=False)
class WholeTensor(LiveElements):
    """All elements of a tensor, in order.

    Attributes:
        bits: ``(numel,)`` live bits.
    """

    bits: LiveBits

    @property
    @override
    def storage(self) -> LiveBits:
        return self.bits

    @property
    @override
    def view(self) -> LiveBits:
        return self.bits

    @property
    @override
    def box(self) -> WindowPlace:
        return WindowPlace(0, 0, np.array([(len(self.bits), 1, 1)]))

    @override
    def locate(self, indices: LiveBits) -> tuple[Any, LiveBits]:
        return slice(None), indices

    @override
    def take(self, full: LiveBits, start: int = 0) -> LiveBits:
        return kernels_for(self.bits).receive(full, self.bits)

    @override
    def digest(self, key: tuple[int, int], bits: LiveBits) -> StateDigest:
        return kernels_for(bits).digest(key, bits)


def state_of(spec: TensorSpec, live: LiveElements) -> StateDigest:
    """Return the state digest of live elements of a tensor."""
    return live.digest(digest_key(spec), live.view)


def sum_states(states: Iterable[StateDigest | None]) -> StateDigest | None:
    """Add up the state digests of tensors; ``None`` if one of them has none."""
    total = StateDigest()
    for state in states:
        if state is None:
            return None
        total += state
    return total
