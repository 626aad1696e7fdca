"""Diff of the weights published by a rank: changed elements, routed to checkpoint tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deltachain.kernels.move import digest_change
from deltachain.kernels.reference import Changes
from deltachain.publish.model.source import Weight
from deltachain.types import StateDigest, TensorSpec


class RoutedChanges(NamedTuple):
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
    """Changed elements of the weights published by a rank; routed and digested once.

    Attributes:
        live: Changes by live weight and flat indices into the rank's shard; weights without changes
            are omitted.
        routed: The same changes by checkpoint tensor, in the order of the weights.
        digest: Change of the state digest.
    """

    live: Mapping[str, Changes]
    routed: tuple[RoutedChanges, ...]
    digest: StateDigest

    @property
    def nnz(self) -> int:
        """Number of changed elements."""
        return sum(changes.indices.size for changes in self.live.values())


NO_CHANGES = Diff({}, (), StateDigest())


def route(live: Mapping[str, Changes], weights: Sequence[Weight]) -> Diff:
    """Route changes of live weights to checkpoint tensors, and compute their digests."""
    routed = []
    for weight in weights:
        found = live.get(weight.spec.name)
        if found is None:
            continue
        for spec, select, indices in weight.route.split(found.indices):
            changes = Changes(indices, found.old[select], found.new[select])
            routed.append(RoutedChanges(weight, spec, changes, digest_change(spec, *changes)))
    return Diff(live, tuple(routed), sum((one.digest for one in routed), StateDigest()))
