"""The kernels that reading and writing live weights needs, for host and device alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from deltachain.kernels import host
from deltachain.types import StateDigest

if TYPE_CHECKING:
    from torch import Tensor

LiveBits: TypeAlias = "npt.NDArray[Any] | Tensor"
"""Bits of weights: unsigned integers in numpy on the host; in torch elsewhere, signed ones of the
same width (uint8 for one byte)."""

B = TypeVar("B", bound=LiveBits)
"""One kind of array: all arguments of a call are of the same kind, and so is its result."""


class BitKernels(Protocol[B]):
    """Operations on live bits: of :mod:`.host` in numpy, of :mod:`.device` in torch.

    ``n`` counts the elements of some weights, ``nnz`` those of a change. Bits have the integer
    dtype of their width. Indices are int64 and within bounds; nothing here checks that.
    """

    def gather(self, weights: B, indices: B) -> B:
        """Bits at ``(nnz,)`` indices of ``(n,)`` bits, as a new ``(nnz,)`` array."""

    def scatter_(self, weights: B, indices: B, bits: B) -> None:
        """Write ``(nnz,)`` bits at ``(nnz,)`` distinct indices of ``(n,)`` bits."""

    def overwrite_(self, weights: B, bits: B) -> None:
        """Write all of some bits, in any shape and strides; both have the same shape."""

    def copy(self, bits: B) -> B:
        """The same bits and shape in new memory."""

    def equal(self, one: B, other: B) -> bool:
        """Whether two arrays of one shape hold the same bits."""

    def digest(self, key: tuple[int, int], bits: B, start: int = 0) -> StateDigest:
        """State digest of ``(n,)`` consecutive elements, the first of which has index ``start``."""

    def digest_at(self, key: tuple[int, int], indices: B, bits: B) -> StateDigest:
        """State digest of ``(nnz,)`` elements at ``(nnz,)`` indices into the full tensor."""

    def receive(self, array: LiveBits, live: B) -> B:
        """An array of either kind where ``live`` is; the array itself if it is there already.

        Args:
            array: Bits, int64 indices or a bool mask, in any shape.
            live: Bits on the host or on the device; not read.
        """

    def flat(self, bits: B) -> B:
        """Bits of any shape as a contiguous ``(n,)`` array; a view where that is possible."""

    def strided(self, flat: B, offset: int, shape: Sequence[int], stride: Sequence[int]) -> B:
        """A view of ``(n,)`` elements in ``shape``; offset and strides count elements."""

    def bounds(self, indices: B, low: int, high: int) -> tuple[int, int]:
        """The range of ``(nnz,)`` increasing indices that lie in ``[low, high)``."""

    def address(self, bits: B) -> int:
        """Address of the first element."""


def kernels_for(bits: B) -> BitKernels[B]:
    """The kernels for an array; torch is imported for tensors alone."""
    if isinstance(bits, np.ndarray):
        return cast("BitKernels[B]", host)
    from deltachain.kernels import device  # noqa: PLC0415 - torch is loaded: bits are a tensor

    return cast("BitKernels[B]", device)


def same_bits(one: LiveBits, other: LiveBits) -> bool:
    """Whether two arrays of one kind hold the same bits."""
    kernels = kernels_for(one)
    return kernels is kernels_for(other) and kernels.equal(one, other)
