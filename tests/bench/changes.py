"""Changed elements of one update: what every encoding and every peer's layout encodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from deltachain.types import Bits, Indices, TensorSpec


@dataclass(frozen=True, slots=True)
class TensorChange:
    spec: TensorSpec
    indices: Indices
    old: Bits
    new: Bits

    @property
    def numel(self) -> int:
        return self.spec.numel

    @property
    def nnz(self) -> int:
        return int(self.indices.size)


ChangedTensors: TypeAlias = Mapping[str, TensorChange]
"""Changes by tensor name, in checkpoint order; a tensor may have none."""


def changes_of(
    step: Mapping[str, tuple[Bits, Bits]], specs: Iterable[TensorSpec]
) -> dict[str, TensorChange]:
    changes = {}
    for spec in specs:
        old, new = step[spec.name]
        indices = np.flatnonzero(old != new)
        changes[spec.name] = TensorChange(spec, indices, old[indices], new[indices])
    return changes


def count(changes: ChangedTensors) -> int:
    return sum(change.nnz for change in changes.values())


def dense_nbytes(changes: ChangedTensors) -> int:
    return sum(change.spec.nbytes for change in changes.values())
