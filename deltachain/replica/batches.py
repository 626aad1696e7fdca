"""Changes of many tensors that a rank reads, stages and writes together.

A rank holds thousands of tensors, most of them small. What is known of each before the first
version is in tables; what an object says of them is in its columns. So a stage costs little a
tensor: it reads runs of consecutive segments from the streams, whichever tensors they are of.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise, zip_longest
from typing import ClassVar, Final, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from deltachain.chain.tensor_plan import TensorPlan
from deltachain.codec import Part
from deltachain.codec.columns import RowColumns
from deltachain.codec.container import in_bits
from deltachain.errors import MalformedError
from deltachain.format.keys import digest_key
from deltachain.kernels import host, segments, staging
from deltachain.kernels.arrays import BrokenSegmentError, StagedBatch
from deltachain.kernels.segments import StreamLayout, TensorStreams
from deltachain.kernels.torch_kernels import INT_DTYPES, storage_bits
from deltachain.subscribe.proof import Effect
from deltachain.subscribe.targets.base import StagedWrite
from deltachain.types import TensorSpec

from .placements import HolderKey, Placement

Numbers = npt.NDArray[np.int64]
Chosen: TypeAlias = "slice | npt.NDArray[np.bool_]"  # selector of segments of a run

BATCHED: Final = frozenset({"step", "overwrite"})
"""Encodings that are staged in batches; others tensor by tensor, on the host."""

GAP_WIDTHS: Final = {"gap8": 1, "gap16.0": 2, "gap16.1": 2}  # bytes of the gaps of each stream

SMALL: Final = 1 << 10
"""Changes of a stretch of one width of gaps below which a copy of all costs less than to cut."""

NO_BYTES: Final[segments.Plane] = np.empty(0, np.uint8)


class LayoutStreams(NamedTuple):
    """Inflated streams of consecutive segments of one layout."""

    layout: StreamLayout
    streams: TensorStreams


@dataclass(frozen=True, eq=False)
class GroupPlan:
    """What one object, or all of a plan, say of some tensors of one element width.

    Attributes:
        stager: Where they are staged.
        parts: Open objects, oldest first, and ascending numbers of rows in each.
        edges: Number of the edge of each object.
    """

    stager: "Stager"
    parts: tuple[tuple[Part, Numbers], ...]
    edges: tuple[int, ...]

    @cached_property
    def names(self) -> Sequence[str]:
        rows = (part.columns.rows[n].name for part, some in self.parts for n in some.tolist())
        return tuple(dict.fromkeys(rows))

    @property
    def key(self) -> str:
        return self.parts[-1][0].key

    def tensor_plans(self) -> Iterator[TensorPlan]:
        """Yield the plan of each tensor by itself."""
        for name in self.names:
            numbers = [n for n, (part, _) in enumerate(self.parts) if name in part.rows]
            parts = tuple(self.parts[n][0] for n in numbers)
            edges = tuple(self.edges[n] for n in numbers)
            yield TensorPlan(parts[0].rows[name].spec, parts, edges=edges)


@dataclass(frozen=True, slots=True)
class BatchWrite(StagedWrite):
    """Changes of many tensors; ``back`` restores the old bits, which are kept."""

    tensors: Sequence[str]
    size: int  # bytes of memory
    back: bool = field(default=False, kw_only=True)

    @property
    @override
    def names(self) -> Sequence[str]:
        return self.tensors

    @property
    @override
    def nbytes(self) -> int:
        return self.size

    @property
    @override
    def can_undo(self) -> bool:
        return True

    @override
    def undo(self) -> Self:
        return replace(self, back=not self.back)

    @override
    def without_old(self) -> Self:
        return self


class Stager(ABC):
    """Tables of tensors whose elements are all in place on one device.

    Attributes:
        folds: Whether several objects that give elements of one tensor are staged together.
        group_nbytes: Bytes of streams up to which tensors are read together.
    """

    folds: ClassVar[bool]
    group_nbytes: ClassVar[int]

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
        keys = [digest_key(specs[name]) for name in found]
        forms = [(specs[name].dtype, specs[name].shape) for name in found]
        self._forms = {form: n for n, form in enumerate(dict.fromkeys(forms))}
        self._form = np.array([self._forms[form] for form in forms], np.int64)
        self._numel = np.array([specs[name].numel for name in found], np.int64)
        self._width = np.array([*(specs[name].itemsize for name in found), 0], np.int64)
        spans = [[place.span for _, place in places] for places in found.values()]
        self._low = np.array([min(low for low, _ in some) for some in spans], np.int64)
        self._high = np.array([max(high for _, high in some) for some in spans], np.int64)
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
        self.names = frozenset(found)
        self._tables = {
            width: segments.PlacementTable.build(live, keys, live[0].storage.device)
            for width, live in by_width.items()
        }

    @abstractmethod
    def warm_up(self) -> None:
        """Compile what stages need, before the first version."""

    def groups(self, objects: Sequence[tuple[int, Part]]) -> tuple[list[GroupPlan], set[str]]:
        """Divide what some objects, each with its edge, say of tensors that are staged here.

        A tensor is left out if any object gives it in another form or encoding. Returns the names
        of the others too.
        """
        found = [self._tensors_of(part.columns) for _, part in objects]
        taken = np.append(np.ones(len(self._names), np.bool_), False)
        nbytes = np.zeros(len(taken))
        for (_, part), (numbers, fits) in zip(objects, found, strict=True):
            taken[numbers[~fits]] = False
            np.add.at(nbytes, numbers, _nbytes(part.columns))
        chunk = (np.cumsum(nbytes) // self.group_nbytes).astype(np.int64)
        label = np.where(taken, chunk * 16 + self._width, -1)
        members: dict[int, list[tuple[int, Numbers]]] = defaultdict(list)
        for n, (numbers, _) in enumerate(found):
            mine = label[numbers]
            order = np.argsort(mine, kind="stable")
            for rows in np.split(order, np.flatnonzero(np.diff(mine[order])) + 1):
                if rows.size and mine[rows[0]] >= 0:
                    members[int(mine[rows[0]])].append((n, rows))
        groups = [
            GroupPlan(
                self,
                tuple((objects[n][1], rows) for n, rows in some),
                tuple(objects[n][0] for n, _ in some),
            )
            for _, some in sorted(members.items())
        ]
        return groups, {self._names[n] for n in np.flatnonzero(taken).tolist()}

    def _tensors_of(self, columns: RowColumns) -> tuple[Numbers, npt.NDArray[np.bool_]]:
        """Return the number here of each row's tensor, or -1, and whether it is staged so."""
        numbers = np.array([self._numbers.get(name, -1) for name in columns.number], np.int64)
        forms = [
            self._forms.get((one.row.dtype, one.row.shape), -1)
            if one.encoding.name in BATCHED
            else -1
            for one in columns.kinds
        ]
        form = np.array(forms, np.int64)[columns.kind]
        fits = (numbers >= 0) & (form >= 0) & (form == np.append(self._form, -1)[numbers])
        if "sign" in columns.starts:  # another encoding may have put bits into one of them alone
            fits &= columns.starts["sign"] == columns.starts["exception"]
        return numbers, fits

    def read(self, group: GroupPlan) -> list[list[LayoutStreams]]:
        """Verify and inflate what each object of a group says near the elements held."""
        return [self._read(part, rows) for part, rows in group.parts]

    def _read(self, part: Part, rows: Numbers) -> list[LayoutStreams]:
        columns = part.columns
        counts = np.diff(columns.first)[rows]
        owner = np.repeat(rows, counts)
        at = np.arange(len(owner)) + np.repeat(
            columns.first[rows] - np.cumsum(counts) + counts, counts
        )
        numbers = [self._numbers[columns.rows[n].name] for n in rows.tolist()]
        tensor = np.repeat(np.array(numbers, np.int64), counts)
        start, length = columns.segments[at, 0], columns.segments[at, 1]
        near = (start + length > self._low[tensor]) & (start < self._high[tensor])
        order = np.flatnonzero(near)[np.argsort(columns.turn[at[near]])]
        owner, at, tensor = owner[order], at[order], tensor[order]
        kind = columns.kind[owner]
        absolute = np.array([one.encoding.name != "step" for one in columns.kinds])[kind]
        apart = np.diff(columns.turn[at]) != 1
        apart |= (np.diff(columns.bucket[owner]) != 0) | (absolute[1:] != absolute[:-1])
        found: list[LayoutStreams] = []
        for some in np.split(np.arange(len(at)), np.flatnonzero(apart) + 1) if len(at) else ():
            run = _Run(part, owner[some], at[some], tensor[some], self._numel[tensor[some]])
            found += run.read()
        return found

    def effects(self, sums: "torch.Tensor | npt.NDArray[np.uint64]") -> Mapping[HolderKey, Effect]:
        """Return the effects on the state digest by slot; see :attr:`StagedChanges.sums`."""
        found = zip(self._slots, segments.effects(sums), strict=False)
        return {
            slot: Effect(change=one.added - one.removed, nnz=one.nnz)
            for slot, one in found
            if one.nnz
        }


def _nbytes(columns: RowColumns) -> npt.NDArray[np.float64]:
    """Return the bytes of streams of each row."""
    total = np.zeros(len(columns.rows))
    for name, length in columns.lengths.items():
        total += length / (8 if in_bits(name) else 1)
    return total


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Consecutive segments of one bucket, element width and encoding.

    Attributes:
        owner: ``(n,)`` number of the row of each segment.
        at: ``(n,)`` number of each segment in the part.
        tensor: ``(n,)`` number of its tensor in the tables.
        numel: ``(n,)`` elements of that.
    """

    part: Part
    owner: Numbers
    at: Numbers
    tensor: Numbers
    numel: Numbers

    def read(self) -> Iterator[LayoutStreams]:
        """Verify and inflate the streams, and divide them where the width of gaps changes."""
        columns, own = self.part.columns, self.part.columns.segments[self.at]
        row = columns.rows[self.owner[0]]
        gap = np.array([one.row.gap for one in columns.kinds])[columns.kind[self.owner]]
        absolute = row.encoding != "step"
        values = [f"{'value' if absolute else 'wide'}.{k}" for k in range(row.itemsize)]
        column = dict.fromkeys(GAP_WIDTHS, 3) | dict.fromkeys(values, 2 if absolute else 5)
        if not absolute:
            column |= {"sign": 2, "exception": 2, "magnitude": 4}
        starts, lengths = {}, {}
        for name, n in column.items():
            counts = own[:, n] * (gap == GAP_WIDTHS[name] if n == 3 else 1)
            first = int((counts > 0).argmax())
            start = columns.starts[name][self.owner[first]] if counts.any() else 0
            starts[name] = int(start + columns.before[self.at[first], n])
            lengths[name] = int(counts.sum())
        reader = self.part.run(row, starts, lengths)
        units = {name: reader.units(name) for name in column if not in_bits(name)}
        sign, bit = (NO_BYTES, 0) if absolute else reader.packed("sign")
        exception = NO_BYTES if absolute else reader.packed("exception")[0]
        for chosen in _alike(gap, own[:, 2]):
            width, counts = int(gap[chosen][0]), own[chosen]
            mine = {
                name: _cut(units[name], own[:, n] * (gap == width) if n == 3 else own[:, n], chosen)
                for name, n in column.items()
                if name in units and GAP_WIDTHS.get(name, width) == width
            }
            signs, first = _cut_bits(sign, bit, own[:, 2], chosen)
            streams = TensorStreams(
                tensor=self.tensor[chosen],
                numel=self.numel[chosen],
                segments=counts,
                planes=[mine[name] for name in values],
                gaps=[mine[name] for name in GAP_WIDTHS if name in mine],
                sign=signs,
                exception=_cut_bits(exception, bit, own[:, 2], chosen)[0],
                magnitude=mine.get("magnitude", NO_BYTES),
                bit=first,
            )
            yield LayoutStreams(StreamLayout(row.itemsize, width, absolute), streams)


def _alike(gap: Numbers, nnz: Numbers) -> Iterator[Chosen]:
    """Yield selectors of segments with one width of gaps: slices, or masks of many small ones."""
    cuts = [0, *(np.flatnonzero(np.diff(gap)) + 1).tolist(), len(gap)]
    if len(cuts) > 3 and nnz.sum() < SMALL * len(cuts):
        yield from (gap == width for width in (1, 2))
    else:
        yield from (slice(*pair) for pair in pairwise(cuts))


def _cut(units: segments.Plane, counts: Numbers, chosen: Chosen) -> segments.Plane:
    """Return the units of some segments; ``counts`` are those of all."""
    if isinstance(chosen, slice):
        first, last = (int(counts[:end].sum()) for end in (chosen.start, chosen.stop))
        return units[first:last]
    return units[np.repeat(chosen, counts)]


def _cut_bits(
    packed: segments.Plane,
    bit: int,
    counts: Numbers,
    chosen: Chosen,
) -> tuple[segments.Plane, int]:
    """Return the bits of some segments, and the first of them below 8; all begin at ``bit``."""
    if not packed.size:
        return packed, 0
    if isinstance(chosen, slice):
        first, last = (bit + int(counts[:end].sum()) for end in (chosen.start, chosen.stop))
        return packed[first // 8 : (last + 7) // 8], first % 8
    bits = np.unpackbits(packed, bitorder="little")[bit : bit + int(counts.sum())]
    return np.packbits(bits[np.repeat(chosen, counts)], bitorder="little"), 0


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


# For a device, the host copies streams there as they are: about 1.3 bytes a change. All else runs
# where the weights are, in batches of many tensors.
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
            layout = segments.StreamLayout(width, 1, absolute=False)
            bits = np.zeros(1, np.uint8)
            one = segments.TensorStreams(
                tensor=0,
                numel=1,
                segments=np.array([(0, 1, 1, 1, 0, 0)]),
                planes=[NO_BYTES] * width,
                gaps=[bits],
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
