"""Interface of the kernels that read and write live weights, on host and device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from deltachain.delta import TensorDelta, new_bits
from deltachain.format.keys import digest_key
from deltachain.kernels import host
from deltachain.types import Bits, Indices, StateDigest, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


LiveBits: TypeAlias = "npt.NDArray[Any] | Tensor"
"""Bits of weights: unsigned integers in numpy on the host; signed ones of the same width in torch
elsewhere (uint8 for one byte)."""

B = TypeVar("B", bound=LiveBits)
"""Kind of array, the same for all arguments and the result of a call."""


class BitKernels(Protocol[B]):
    """Operations on live bits: :mod:`.host` in numpy, :mod:`.torch_kernels` in torch.

    ``n`` is the number of elements of weights, ``nnz`` that of a change. Bits have the integer
    dtype of their width. Indices are int64 and must be within bounds, which is not checked.
    """

    def gather(self, weights: B, indices: B) -> B:
        """Return the bits at ``(nnz,)`` indices of ``(n,)`` bits, as a new ``(nnz,)`` array."""

    def scatter_(self, weights: B, indices: B, bits: B) -> None:
        """Write ``(nnz,)`` bits at ``(nnz,)`` distinct indices of ``(n,)`` bits."""

    def overwrite_(self, weights: B, bits: B) -> None:
        """Overwrite all weights, of any strides, with bits of the same shape."""

    def copy(self, bits: B) -> B:
        """Copy bits to new memory, in the same shape."""

    def equal(self, one: B, other: B) -> bool:
        """Return whether two arrays of one shape have equal bits."""

    def digest(self, key: tuple[int, int], bits: B, start: int = 0) -> StateDigest:
        """Compute the state digest of ``(n,)`` consecutive elements, the first at ``start``."""

    def digest_at(self, key: tuple[int, int], indices: B, bits: B) -> StateDigest:
        """Compute the state digest of ``(nnz,)`` elements at indices into the full tensor."""

    def receive(self, array: LiveBits, live: B) -> B:
        """Move an array of either kind to the location of ``live``; no copy if already there."""

    def flat(self, bits: B) -> B:
        """Return bits of any shape as a contiguous ``(n,)`` array, a view if possible."""

    def strided(self, flat: B, offset: int, shape: Sequence[int], stride: Sequence[int]) -> B:
        """Return a view of ``(n,)`` elements in ``shape``; offset and strides count elements."""

    def bounds(self, indices: B, low: int, high: int) -> tuple[int, int]:
        """Return the range of positions of ``(nnz,)`` increasing indices in ``[low, high)``."""

    def address(self, bits: B) -> int:
        """Return the address of the first element."""


def kernels_for(bits: B) -> BitKernels[B]:
    """Return the kernels for an array; import torch for tensors only."""
    if isinstance(bits, np.ndarray):
        return cast("BitKernels[B]", host)
    from deltachain.kernels import torch_kernels  # noqa: PLC0415 - torch is loaded: bits are a tensor

    return cast("BitKernels[B]", torch_kernels)


def same_bits(one: LiveBits, other: LiveBits) -> bool:
    kernels = kernels_for(one)
    return kernels is kernels_for(other) and kernels.equal(one, other)


@dataclass(frozen=True, slots=True)
class Move(Generic[B]):
    """Old and new bits of some elements, and their contributions to the state digest."""

    old: B  # old bits, shape `(nnz,)`
    new: B  # new bits, shape `(nnz,)`
    added: StateDigest
    # State digest of the old bits; zero for a dense delta, which sets every element.
    removed: StateDigest

    @property
    def change(self) -> StateDigest:
        return self.added - self.removed


def move(bits: Bits, delta: TensorDelta, start: int = 0) -> Move[npt.NDArray[Any]]:
    """Compute the effect of a delta on the bits of elements from ``start`` on; writes nothing."""
    key = digest_key(delta.spec)
    if delta.indices is None:
        old = bits[delta.start - start :][: delta.nnz]
        return Move(old, delta.values, host.digest(key, delta.values, delta.start), StateDigest())
    weights: npt.NDArray[Any] = bits
    indices: npt.NDArray[Any] = delta.indices
    places = indices - start if start else indices
    return move_at(weights, places, key, indices, delta.values, delta.absolute)


def move_at(
    weights: B,
    positions: B,
    key: tuple[int, int],
    indices: B,
    values: B,
    absolute: Any,  # noqa: ANN401 - an array of either kind
) -> Move[B]:
    """Compute the effect of a sparse delta's elements on live weights; writes nothing.

    Each of ``(nnz,)`` elements has a position in the ``(n,)`` weights, a flat index in the full
    tensor, and a value: new bits if it is ``absolute``, else a step.
    """
    kernels = kernels_for(weights)
    old = kernels.gather(weights, positions)
    new = new_bits(old, values, absolute)
    added = kernels.digest_at(key, indices, new)
    return Move(old, new, added, kernels.digest_at(key, indices, old))


def write_(weights: B, positions: B | None, new: B) -> None:
    """Write new bits at ``(nnz,)`` positions of ``(n,)`` weights, or all bits of any shape."""
    if positions is None:
        kernels_for(weights).overwrite_(weights, new)
    else:
        kernels_for(weights).scatter_(weights, positions, new)


def digest_change(spec: TensorSpec, indices: Indices, old: Bits, new: Bits) -> StateDigest:
    """Compute the change of the state digest by ``(nnz,)`` elements, from old to new bits."""
    key = digest_key(spec)
    return host.digest_at(key, indices, new) - host.digest_at(key, indices, old)
