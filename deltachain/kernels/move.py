"""Effect of a delta on the bits of a tensor and on the state digest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

import numpy.typing as npt

from deltachain.delta import TensorDelta, new_bits
from deltachain.format.keys import digest_key
from deltachain.kernels import host
from deltachain.kernels.protocol import B, kernels_for
from deltachain.types import Bits, Indices, StateDigest, TensorSpec


@dataclass(frozen=True, slots=True)
class Move(Generic[B]):
    """Old and new bits of some elements, and their contributions to the state digest.

    Attributes:
        old: Old bits, shape ``(nnz,)``.
        new: New bits, shape ``(nnz,)``.
        removed: State digest of the old bits; zero for a dense delta, which sets every element.
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
    """Compute the effect of a delta on all ``(numel,)`` bits of its tensor; writes nothing."""
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
