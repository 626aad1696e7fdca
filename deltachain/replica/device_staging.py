"""Staging on a device: streams of many tensors are decoded, routed and proven there at once.

The host reads, verifies and inflates segments, and copies their streams to the device as they are:
about 1.3 bytes a change. Everything else runs where the weights are, in batches of many tensors.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from typing_extensions import override

from deltachain.codec.frames import TensorReader
from deltachain.format.keys import digest_key
from deltachain.kernels import segments, staging
from deltachain.kernels.torch_kernels import INT_DTYPES, storage_bits
from deltachain.subscribe.proof import Effect
from deltachain.subscribe.targets.base import StagedWrite
from deltachain.types import TensorSpec

from .placements import Placement
from .spool_reader import TensorPlan
from .staged import HolderKey, ObjectStreams, PlanStreams

_NONE: Final[segments.Plane] = np.empty(0, np.uint8)

ON_DEVICE: Final = frozenset({"step", "overwrite"})
"""Encodings that are decoded on the device; the host decodes others."""


@dataclass(frozen=True, slots=True)
class DeviceWrite(StagedWrite):
    """Changes of many tensors, staged on their device; ``back`` restores the old bits."""

    changes: segments.StagedChanges
    tensors: tuple[str, ...]
    back: bool = False

    @property
    @override
    def names(self) -> Sequence[str]:
        return self.tensors

    @property
    @override
    def nbytes(self) -> int:
        return self.changes.nbytes

    @property
    @override
    def can_undo(self) -> bool:
        return True

    @override
    def run(self) -> None:
        (staging.undo_ if self.back else staging.write_)(self.changes)

    @override
    def undo(self) -> "DeviceWrite":
        return replace(self, back=not self.back)

    @override
    def without_old(self) -> "DeviceWrite":
        return self


class DeviceStager:
    """Stages tensor plans of tensors whose elements are all in place on one device."""

    def __init__(
        self,
        placements: Mapping[str, Sequence[tuple[HolderKey, Placement]]],
        specs: Mapping[str, TensorSpec],
    ) -> None:
        found = {name: places for name, places in placements.items() if places}
        self._names = tuple(found)
        self._numbers = {name: number for number, name in enumerate(found)}
        self._slots = tuple(dict.fromkeys(slot for places in found.values() for slot, _ in places))
        slots = {slot: number for number, slot in enumerate(self._slots)}
        self._keys = [digest_key(specs[name]) for name in found]
        by_width: dict[int, list[segments.LivePlacement]] = defaultdict(list)
        for name, places in found.items():
            for slot, place in places:
                by_width[specs[name].itemsize].append(
                    segments.LivePlacement(
                        tensor=self._numbers[name],
                        offset=place.offset,
                        dims=place.dims,
                        storage=storage_bits(place.live),
                        at=place.at,
                        slot=slots[slot],
                    )
                )
        devices = (place.storage.device for live in by_width.values() for place in live)
        self.device = next(devices, torch.device("cpu"))
        self.tensors = len(found)
        self._tables = {
            width: segments.PlacementTable.build(live, self._keys, live[0].storage.device)
            for width, live in by_width.items()
        }

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
                    planes=[_NONE] * width,
                    gaps=[bits] * gap,
                    sign=bits,
                    exception=bits,
                )
                batch = segments.pack(layout, [one], staging.allocator(self.device))
                changes = staging.decode(batch, staging.upload(batch, self.device))
                staging.write_(staging.stage(changes, place, [""]))

    def takes(self, given: TensorPlan) -> bool:
        """Return whether changes are decoded on the device: no whole tensors, known encodings."""
        return (
            given.spec.name in self._numbers
            and given.base is None
            and not given.from_nothing
            and all(part.rows[given.spec.name].encoding in ON_DEVICE for part in given.parts)
        )

    def read(self, given: TensorPlan, low: int, high: int) -> PlanStreams:
        """Verify and inflate the segments of a tensor plan near the elements ``[low, high)``."""
        name = given.spec.name
        readers = (part.reader(name, (low, high)) for part in given.parts)
        number = self._numbers[name]
        return PlanStreams(given, tuple(streams_of(one, number) for one in readers if one.segments))

    def stage(
        self, plans: Sequence[PlanStreams]
    ) -> Iterator[tuple[DeviceWrite, Mapping[HolderKey, Effect]]]:
        """Stage tensor plans of different tensors, one write for each element width."""
        by_width: dict[int, list[PlanStreams]] = defaultdict(list)
        for one in plans:
            if one.versions:
                by_width[one.given.spec.itemsize].append(one)
        for width, group in by_width.items():
            changes = staging.fold(self._decoded(group))
            staged = staging.stage(changes, self._tables[width], self._names)
            names = tuple(dict.fromkeys(one.given.spec.name for one in group))
            yield DeviceWrite(staged, names), self._effects(staged)

    def _decoded(self, group: Sequence[PlanStreams]) -> list[segments.ChangeBatch]:
        """Decode tensors of one width, one batch for each version and layout, oldest first."""
        found: list[segments.ChangeBatch] = []
        memory = staging.allocator(self.device)
        for version in range(max(len(one.versions) for one in group)):
            layouts: dict[segments.StreamLayout, list[segments.TensorStreams]] = defaultdict(list)
            for one in group:
                if version < len(one.versions):
                    layout, streams = one.versions[version]
                    layouts[layout].append(streams)
            for layout, tensors in layouts.items():
                packed = segments.pack(layout, sorted(tensors, key=lambda one: one.tensor), memory)
                found.append(staging.decode(packed, staging.upload(packed, self.device)))
        return found

    def _effects(self, staged: segments.StagedChanges) -> Mapping[HolderKey, Effect]:
        found = zip(self._slots, segments.effects(staged.sums), strict=False)
        return {
            slot: Effect(change=one.added - one.removed, nnz=one.nnz)
            for slot, one in found
            if one.nnz
        }


def streams_of(reader: TensorReader, number: int) -> ObjectStreams:
    """Verify and inflate the streams of segments, without decoding them."""
    row, width = reader.row, reader.spec.itemsize
    absolute = row.encoding != "step"
    gaps = ("gap8",) if row.gap == 1 else ("gap16.0", "gap16.1")
    values = "value" if absolute else "wide"
    sign, bit = (_NONE, 0) if absolute else reader.packed("sign")
    streams = segments.TensorStreams(
        tensor=number,
        numel=reader.spec.numel,
        segments=reader.table,
        planes=[reader.units(f"{values}.{k}") for k in range(width)],
        gaps=[reader.units(name) for name in gaps],
        sign=sign,
        exception=_NONE if absolute else reader.packed("exception")[0],
        magnitude=_NONE if absolute else reader.units("magnitude"),
        bit=bit,
    )
    return ObjectStreams(segments.StreamLayout(width, row.gap, absolute), streams)
