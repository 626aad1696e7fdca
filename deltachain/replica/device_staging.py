"""Staging on a device: streams of many tensors are decoded, routed and proven there at once.

The host reads, verifies and inflates segments, and copies their streams to the device as they are:
about 1.3 bytes a change. Everything else runs where the weights are, in batches of many tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from typing_extensions import override

from deltachain.codec.frames import TensorReader
from deltachain.format.keys import digest_key
from deltachain.kernels import staging
from deltachain.kernels.device import INT_DTYPES, storage_bits
from deltachain.kernels.segments import (
    ChangeBatch,
    LivePlacement,
    PlacementTable,
    Plane,
    StagedChanges,
    StreamLayout,
    TensorStreams,
    effects,
    pack,
)
from deltachain.replica.spool_reader import TensorPlan
from deltachain.replica.staged import BatchStager, HolderKey, ObjectStreams, PlanStreams
from deltachain.replica.windows import Placement
from deltachain.subscribe.proof import Effect
from deltachain.subscribe.targets.base import StagedWrite
from deltachain.types import TensorSpec

_NONE: Final[Plane] = np.empty(0, np.uint8)

ON_DEVICE: Final = frozenset({"step", "overwrite"})
"""Encodings that are decoded on the device; the host decodes others."""


@dataclass(frozen=True, slots=True)
class DeviceWrite(StagedWrite):
    """Changes of many tensors, staged on their device; ``back`` restores the old bits."""

    changes: StagedChanges
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
    def undo(self) -> DeviceWrite:
        return replace(self, back=not self.back)

    @override
    def without_old(self) -> DeviceWrite:
        return self


class DeviceStager(BatchStager):
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
        by_width: dict[int, list[LivePlacement]] = defaultdict(list)
        for name, places in found.items():
            for slot, place in places:
                by_width[specs[name].itemsize].append(
                    LivePlacement(
                        tensor=self._numbers[name],
                        offset=place.offset,
                        dims=place.dims,
                        storage=storage_bits(place.live),
                        at=place.at,
                        slot=slots[slot],
                    )
                )
        self._device = next((p.storage.device for ps in by_width.values() for p in ps), None)
        self._tables = {
            width: PlacementTable.build(live, self._keys, live[0].storage.device)
            for width, live in by_width.items()
        }

    def warm_up(self) -> None:
        """Compile the kernels of every layout of steps, before the first version."""
        for width, table in self._tables.items():
            live = torch.zeros(1, dtype=INT_DTYPES[width], device=self.device)
            dims = ((1, 1, 1),) * table.ndim
            place = PlacementTable.build([LivePlacement(0, 0, dims, live)], [(0, 0)], self.device)
            for gap in (1, 2):
                layout, bits = StreamLayout(width, gap, absolute=False), np.zeros(1, np.uint8)
                one = TensorStreams(
                    tensor=0,
                    numel=1,
                    segments=np.array([(0, 1, 1, 1, 0, 0)]),
                    planes=[_NONE] * width,
                    gaps=[bits] * gap,
                    sign=bits,
                    exception=bits,
                )
                batch = pack(layout, [one], staging.allocator(self.device))
                changes = staging.decode(batch, staging.upload(batch, self.device))
                staging.write_(staging.stage(changes, place, [""]))

    @override
    def takes(self, given: TensorPlan) -> bool:
        """Return whether changes are decoded on the device: no whole tensors, known encodings."""
        return (
            given.spec.name in self._numbers
            and given.base is None
            and not given.from_nothing
            and all(part.rows[given.spec.name].encoding in ON_DEVICE for part in given.parts)
        )

    @override
    def read(self, given: TensorPlan, low: int, high: int) -> PlanStreams:
        """Verify and inflate the segments of a tensor plan near the elements ``[low, high)``.

        Raises:
            DigestMismatchError: A frame differs from its digest in the directory.
            MalformedError: An object violates FORMAT.md.
        """
        name = given.spec.name
        readers = (part.reader(name, (low, high)) for part in given.parts)
        number = self._numbers[name]
        return PlanStreams(given, tuple(streams_of(one, number) for one in readers if one.segments))

    @override
    def stage(
        self, plans: Sequence[PlanStreams]
    ) -> Iterator[tuple[DeviceWrite, Mapping[HolderKey, Effect]]]:
        """Stage tensor plans of different tensors, one write for each element width.

        Raises:
            MalformedError: The streams of a tensor violate FORMAT.md.
        """
        by_width: dict[int, list[PlanStreams]] = defaultdict(list)
        for one in plans:
            if one.versions:
                by_width[one.given.spec.itemsize].append(one)
        for width, group in by_width.items():
            changes = staging.fold(self._decoded(group))
            staged = staging.stage(changes, self._tables[width], self._names)
            names = tuple(dict.fromkeys(one.given.spec.name for one in group))
            yield DeviceWrite(staged, names), self._effects(staged)

    def _decoded(self, group: Sequence[PlanStreams]) -> list[ChangeBatch]:
        """Decode tensors of one width, one batch for each version and layout, oldest first."""
        found: list[ChangeBatch] = []
        memory = staging.allocator(self.device)
        for version in range(max(len(one.versions) for one in group)):
            layouts: dict[StreamLayout, list[TensorStreams]] = defaultdict(list)
            for one in group:
                if version < len(one.versions):
                    layout, streams = one.versions[version]
                    layouts[layout].append(streams)
            for layout, tensors in layouts.items():
                packed = pack(layout, sorted(tensors, key=lambda one: one.tensor), memory)
                found.append(staging.decode(packed, staging.upload(packed, self.device)))
        return found

    @property
    def tensors(self) -> int:
        return len(self._names)

    @property
    def device(self) -> torch.device:
        return self._device or torch.device("cpu")

    def _effects(self, staged: StagedChanges) -> Mapping[HolderKey, Effect]:
        found = zip(self._slots, effects(staged.sums), strict=False)
        return {
            slot: Effect(change=one.added - one.removed, nnz=one.nnz)
            for slot, one in found
            if one.nnz
        }


def streams_of(reader: TensorReader, number: int) -> ObjectStreams:
    """Verify and inflate the streams of segments, without decoding them.

    Args:
        reader: Reader of a tensor in the encoding ``step`` or ``overwrite``.
        number: Number of the tensor in its batch.

    Raises:
        DigestMismatchError: A frame differs from its digest in the directory.
        MalformedError: The padding bits of a stream are not zero.
    """
    row, width = reader.row, reader.spec.itemsize
    absolute = row.encoding != "step"
    gaps = ("gap8",) if row.gap == 1 else ("gap16.0", "gap16.1")
    values = "value" if absolute else "wide"
    sign, bit = (_NONE, 0) if absolute else reader.packed("sign")
    streams = TensorStreams(
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
    return ObjectStreams(StreamLayout(width, row.gap, absolute), streams)
