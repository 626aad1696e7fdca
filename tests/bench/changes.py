"""Changed elements of one update: what every encoding and every peer's layout encodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from deltachain.types import Bits, Indices, TensorSpec


@dataclass(frozen=True, slots=True)
class TensorChange:
    """The changes of one tensor.

    Attributes:
        spec: The tensor.
        indices: Flat indices of the changed elements, strictly increasing.
        old: Their bits before.
        new: Their bits after.
    """

    spec: TensorSpec
    indices: Indices
    old: Bits
    new: Bits

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return self.spec.numel

    @property
    def nnz(self) -> int:
        """Changed elements."""
        return int(self.indices.size)


ChangedTensors: TypeAlias = Mapping[str, TensorChange]
"""Changes by tensor name, in checkpoint order; a tensor may have none."""


def changes_of(
    step: Mapping[str, tuple[Bits, Bits]], specs: Iterable[TensorSpec]
) -> dict[str, TensorChange]:
    """Compare all elements of an update.

    Args:
        step: Old and new bits of each tensor by name, flat.
        specs: These tensors.
    """
    changes = {}
    for spec in specs:
        old, new = step[spec.name]
        indices = np.flatnonzero(old != new)
        changes[spec.name] = TensorChange(spec, indices, old[indices], new[indices])
    return changes


def count(changes: ChangedTensors) -> int:
    """Number of changed elements of all tensors."""
    return sum(change.nnz for change in changes.values())


def dense_nbytes(changes: ChangedTensors) -> int:
    """Size of all tensors as they are, in bytes."""
    return sum(change.spec.nbytes for change in changes.values())
