"""What a delta does to the bits of a tensor, and to the state digest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

import numpy.typing as npt

from deltachain.delta import TensorDelta, new_bits
from deltachain.format.digest import digest_key
from deltachain.kernels import host
from deltachain.kernels.protocol import B, kernels_for
from deltachain.types import Bits, Indices, StateDigest, TensorSpec


@dataclass(frozen=True, slots=True)
class Move(Generic[B]):
    """New bits of some elements of a tensor, and their part of the state digest before and after.

    Attributes:
        old: ``(nnz,)`` bits before.
        new: ``(nnz,)`` bits after.
        added: State digest of the new bits.
        removed: State digest of the old ones; zero where a dense delta gives every element.
    """

    old: B
    new: B
    added: StateDigest
    removed: StateDigest

    @property
    def change(self) -> StateDigest:
        """Change of the state digest."""
        return self.added - self.removed


def move(bits: Bits, delta: TensorDelta) -> Move[npt.NDArray[Any]]:
    """Compute what a delta does to all ``(numel,)`` bits of its tensor; writes nothing."""
    key = digest_key(delta.spec)
    if delta.indices is None:
        return Move(bits, delta.values, host.digest(key, delta.values), StateDigest())
    weights: npt.NDArray[Any] = bits
    indices: npt.NDArray[Any] = delta.indices
    return move_at(weights, indices, key, indices, delta.values, delta.absolute)


def move_at(
    weights: B,
    positions: B,
    key: tuple[int, int],
    indices: B,
    values: B,
    absolute: Any,  # noqa: ANN401 - an array of either kind
) -> Move[B]:
    """Compute what the elements of a sparse delta do to the weights that hold them; writes nothing.

    Args:
        weights: ``(n,)`` live bits.
        positions: ``(nnz,)`` int64, where the elements are in ``weights``.
        key: Digest key of the tensor.
        indices: ``(nnz,)`` int64, their flat indices in the full tensor.
        values: ``(nnz,)`` bits or steps.
        absolute: Bool of shape ``()`` or ``(nnz,)``: whether a value is the new bits, or a step.
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
    """Change of the state digest when ``(nnz,)`` elements at flat indices go from old to new."""
    key = digest_key(spec)
    return host.digest_at(key, indices, new) - host.digest_at(key, indices, old)
