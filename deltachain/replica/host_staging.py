"""Staging on the host: one call decodes, gathers and proves many tensors, and writes nothing."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from typing_extensions import override

from deltachain.errors import MalformedError
from deltachain.kernels import host, segments
from deltachain.kernels.arrays import BrokenSegmentError, StagedBatch
from deltachain.subscribe.proof import Effect

from .batches import BatchWrite, GroupPlan, Stager
from .placements import HolderKey


@dataclass(frozen=True, slots=True)
class HostWrite(BatchWrite):
    """Changes of many tensors, staged on the host."""

    changes: StagedBatch
    places: segments.PlacementTable

    @override
    def run(self) -> None:
        bits = self.changes.old if self.back else self.changes.new
        host.write_batch_(self.places, self.changes, bits)


class HostStager(Stager):
    """Stages groups of tensors whose elements are all in place on the host."""

    folds: ClassVar[bool] = False
    group_nbytes: ClassVar[int] = 1 << 18

    @override
    def warm_up(self) -> None:
        bits = np.ones(1, np.uint8)
        for width, table in self._tables.items():
            layout = segments.StreamLayout(width, 1, absolute=True)
            one = segments.TensorStreams(
                0, 1 << 40, np.array([(1 << 39, 1, 1, 1, 0, 0)]), [bits] * width, [bits - bits]
            )
            batch = segments.pack(layout, [one])
            host.write_batch_(table, staged := host.stage_batch(batch, table), staged.new)

    def stage(self, group: GroupPlan) -> tuple[Sequence[HostWrite], Mapping[HolderKey, Effect]]:
        """Verify, decode and stage a group of one object; may run in any thread."""
        layouts: dict[segments.StreamLayout, list[segments.TensorStreams]] = defaultdict(list)
        (streams,), writes = self.read(group), []
        for layout, some in streams:
            layouts[layout].append(some)
        for layout, tensors in layouts.items():
            batch, places = segments.pack(layout, tensors), self._tables[layout.width]
            try:
                staged = host.stage_batch(batch, places)
            except BrokenSegmentError as exc:
                name = self._names[int(batch.table[exc.number, segments.Column.TENSOR])]
                key = group.parts[0][0].key
                raise MalformedError(f"{key}: {name!r}: {exc}", key=key) from exc
            writes.append(HostWrite(group.names, staged.nbytes, staged, places))
        effects: dict[HolderKey, Effect] = defaultdict(Effect)
        for one in writes:
            for slot, effect in self.effects(one.changes.sums).items():
                effects[slot] += effect
        return writes, effects
