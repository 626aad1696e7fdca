"""Staging on a device: streams of many tensors are decoded, routed and proven there at once.

The host reads, verifies and inflates segments, and copies their streams to the device as they are:
about 1.3 bytes a change. Everything else runs where the weights are, in batches of many tensors.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import ClassVar

import numpy as np
import torch
from typing_extensions import override

from deltachain.kernels import segments, staging
from deltachain.kernels.torch_kernels import INT_DTYPES
from deltachain.subscribe.proof import Effect

from .batches import NO_BYTES, BatchWrite, GroupPlan, LayoutStreams, Stager
from .placements import HolderKey


@dataclass(frozen=True, slots=True)
class DeviceWrite(BatchWrite):
    """Changes of many tensors, staged on their device."""

    changes: segments.StagedChanges

    @override
    def run(self) -> None:
        (staging.undo_ if self.back else staging.write_)(self.changes)


class DeviceStager(Stager):
    """Stages groups of tensors whose elements are all in place on one device."""

    folds: ClassVar[bool] = True
    group_nbytes: ClassVar[int] = 1 << 22

    @override
    def warm_up(self) -> None:
        """Compile the kernels of every layout of steps, before the first version."""
        for width, table in self._tables.items():
            live = torch.zeros(1, dtype=INT_DTYPES[width], device=self.device)
            dims = ((1, 1, 1),) * table.ndim
            place = segments.PlacementTable.build(
                [segments.LivePlacement(0, 0, dims, live)], [(0, 0)], self.device
            )
            for gap in (1, 2):
                layout = segments.StreamLayout(width, gap, absolute=False)
                bits = np.zeros(1, np.uint8)
                one = segments.TensorStreams(
                    tensor=0,
                    numel=1,
                    segments=np.array([(0, 1, 1, 1, 0, 0)]),
                    planes=[NO_BYTES] * width,
                    gaps=[bits] * gap,
                    sign=bits,
                    exception=bits,
                )
                batch = segments.pack(layout, [one], staging.allocator(self.device))
                changes = staging.decode(batch, staging.upload(batch, self.device))
                staging.write_(staging.stage(changes, place, [""]))

    def stage(
        self, groups: Sequence[tuple[GroupPlan, Sequence[Sequence[LayoutStreams]]]]
    ) -> Iterator[tuple[list[GroupPlan], DeviceWrite, Mapping[HolderKey, Effect]]]:
        """Stage groups of different tensors and their streams, one write for each width."""
        by_width: dict[int, list[tuple[GroupPlan, Sequence[Sequence[LayoutStreams]]]]]
        by_width = defaultdict(list)
        for group, objects in groups:
            layouts = [one.layout for some in objects for one in some]
            if layouts:
                by_width[layouts[0].width].append((group, objects))
        for width, some in by_width.items():
            changes = staging.fold(self._decoded([objects for _, objects in some]))
            staged = staging.stage(changes, self._tables[width], self._names)
            plans = [group for group, _ in some]
            names = tuple(dict.fromkeys(name for group in plans for name in group.names))
            yield plans, DeviceWrite(names, staged.nbytes, staged), self.effects(staged.sums)

    def _decoded(
        self, groups: Sequence[Sequence[Sequence[LayoutStreams]]]
    ) -> list[segments.ChangeBatch]:
        """Decode groups of one width, one batch for each version and layout, oldest first."""
        found: list[segments.ChangeBatch] = []
        memory = staging.allocator(self.device)
        for version in zip_longest(*groups, fillvalue=()):
            layouts: dict[segments.StreamLayout, list[segments.TensorStreams]] = defaultdict(list)
            for layout, streams in chain.from_iterable(version):
                layouts[layout].append(streams)
            for layout, some in layouts.items():
                packed = segments.pack(layout, some, memory)
                found.append(staging.decode(packed, staging.upload(packed, self.device)))
        return found
