"""Diff of the weights published by a rank: changed elements by checkpoint tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deltachain.kernels.move import digest_change
from deltachain.kernels.reference import Changes
from deltachain.publish.model.source import Weight
from deltachain.types import StateDigest, TensorSpec


class CheckpointChanges(NamedTuple):
    """Changes of one checkpoint tensor.

    Attributes:
        weight: Live weight of the changes.
        spec: Spec of the checkpoint tensor.
        changes: Changes by flat indices into that tensor.
        digest: Change of the state digest.
    """

    weight: Weight
    spec: TensorSpec
    changes: Changes
    digest: StateDigest


@dataclass(frozen=True, slots=True)
class Diff:
    """Changed elements of the weights of a rank, mapped to the checkpoint and digested once.

    Attributes:
        live: Changes by live weight and flat indices into the rank's shard; weights without changes
            are omitted.
        by_tensor: The same changes by checkpoint tensor, in the order of the weights.
        digest: Change of the state digest.
    """

    live: Mapping[str, Changes]
    by_tensor: tuple[CheckpointChanges, ...]
    digest: StateDigest

    @property
    def nnz(self) -> int:
        """Number of changed elements."""
        return sum(changes.indices.size for changes in self.live.values())


NO_CHANGES = Diff({}, (), StateDigest())


def map_changes(live: Mapping[str, Changes], weights: Sequence[Weight]) -> Diff:
    """Map changes of live weights to checkpoint tensors, and compute their digests."""
    mapped = []
    for weight in weights:
        found = live.get(weight.spec.name)
        if found is None:
            continue
        for spec, select, indices in weight.element_map.split(found.indices):
            changes = Changes(indices, found.old[select], found.new[select])
            mapped.append(CheckpointChanges(weight, spec, changes, digest_change(spec, *changes)))
    return Diff(live, tuple(mapped), sum((one.digest for one in mapped), StateDigest()))
