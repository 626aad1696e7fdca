"""Reader of a spool: what a plan says of each tensor, as its objects arrive.

A *tensor plan* is what a plan says of one tensor. In a plan of one edge every object gives elements
of its own (FORMAT.md 2): each of its tensors is decoded by itself, while later objects are on their
way, unless it needs old bits that another object may change. Longer plans are folded, tensor by
tensor, once all objects are there.
"""

import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from deltachain import errors
from deltachain.checkpoint import Checkpoint
from deltachain.codec import ENCODINGS, Part
from deltachain.codec.container import SEGMENT
from deltachain.codec.frames import TensorReader
from deltachain.delta import OldBits, TensorDelta, bits_are_at_fault, fold_within
from deltachain.file_reader import map_file
from deltachain.kernels import host
from deltachain.kernels.protocol import kernels_for
from deltachain.subscribe.targets.tensor_patch import LiveElements
from deltachain.types import TensorSpec

if TYPE_CHECKING:
    from .batches import GroupPlan, Stager

from .spool import FAILED, SpooledObject, object_file, read_index, writer_is_gone


def host_bits(places: Sequence[LiveElements], spec: TensorSpec, low: int, high: int) -> OldBits:
    """Return bits of the elements ``[low, high)`` that a rank holds, on the host.

    Where those that it holds are consecutive, only these are returned, on the host the live bits
    themselves; others are copied to their places.
    """
    run, nothing = _run(places), np.empty(0, spec.bits_dtype)
    if run is not None:
        storage: Any = places[0].storage
        start, at, numel = run
        return OldBits(host.receive(storage[at : at + numel], nothing), start, shared=True)
    bits, held = np.zeros(high - low, spec.bits_dtype), np.zeros(high - low, np.bool_)
    for place in places:
        here, live = _views(place, bits, low)
        here[...] = host.receive(live, nothing)
        _views(place, held, low)[0][...] = True
    return OldBits(bits, low, held)


def _run(places: Sequence[LiveElements]) -> tuple[int, int, int] | None:
    """Return flat index, position in the storage and number of elements consecutive in both."""
    first, *others = places
    if others:
        return None
    offset, at, dims = first.box
    numel = 1
    for size, there, live in reversed(dims.tolist()):
        if size > 1 and (there, live) != (numel, numel):
            return None
        numel *= size
    return offset, at, numel


def _views(place: LiveElements, flat: Any, start: int) -> tuple[Any, Any]:  # noqa: ANN401
    """Return the elements of a place in flat bits that begin at ``start``, and the live ones."""
    offset, at, dims = place.box
    sizes, there, live = dims.T.tolist() if dims.size else ([1], [1], [1])
    return (
        kernels_for(flat).strided(flat, offset - start, sizes, there),
        kernels_for(place.storage).strided(place.storage, at, sizes, live),
    )


POLL_S: Final = (0.001, 0.004)
"""Shortest and longest wait between two looks for an object, in seconds."""


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """Changes of one tensor by a plan, or by one object of a plan of one edge."""

    spec: TensorSpec
    parts: tuple[Part, ...]  # open objects that give elements of the tensor, oldest first
    base: Checkpoint | None = field(default=None, repr=False)
    from_nothing: bool = False  # whether the plan needs no base bits
    edges: tuple[int, ...] = ()  # number of the edge of each object

    @property
    def names(self) -> tuple[str]:
        return (self.spec.name,)

    def tensor_plans(self) -> "Iterator[TensorPlan]":
        yield self

    @property
    def needs_old(self) -> bool:
        name = self.spec.name
        return not self.from_nothing and any(part.needs_old(name) for part in self.parts)

    def read(
        self, low: int, high: int, old: Callable[[int, int], OldBits] | None = None
    ) -> TensorDelta:
        """Verify, inflate and decode the segments near the elements ``[low, high)``, folded."""
        name = self.spec.name
        deltas: list[TensorDelta] = []
        if self.base is not None:
            deltas.append(TensorDelta.run(self.spec, low, self.base.bits(name)[low:high]))
        before: OldBits | None = None
        edges = self.edges or range(len(self.parts))
        for _, same in groupby(zip(edges, self.parts, strict=True), key=itemgetter(0)):
            parts = [part for _, part in same]
            if before is None and any(part.needs_old(name) for part in parts):
                before = self._before(deltas, low, high, old)
            read = [self._decode(part, (low, high), before) for part in parts]
            if before is not None and parts[-1] is not self.parts[-1]:
                before = before.after(read)
            deltas += (delta for delta in read if delta.nnz)
        empty = np.empty(0, np.int64), np.empty(0, self.spec.bits_dtype)
        found = (
            fold_within(deltas, low, high)
            if deltas
            else TensorDelta(spec=self.spec, indices=empty[0], values=empty[1])
        )
        if self.from_nothing and low < high and not found.covers(low, high):
            raise errors.BrokenChainError(
                f"{name}: the plan from nothing gives only {found.nnz} elements"
            )
        return found

    def _decode(self, part: Part, near: tuple[int, int], old: OldBits | None) -> TensorDelta:
        name = self.spec.name
        if old is None or not part.needs_old(name):
            return part.read(name, near)
        with nullcontext() if self.from_nothing else bits_are_at_fault(name):
            return part.read(name, near, old=old)

    def _before(
        self,
        deltas: Sequence[TensorDelta],
        low: int,
        high: int,
        old: Callable[[int, int], OldBits] | None,
    ) -> OldBits | None:
        # All elements of the segments near the wanted ones.
        start, stop = max(0, low - SEGMENT), min(self.spec.numel, high + SEGMENT)
        if old is not None and not self.from_nothing:
            before = old(start, stop)
        elif self.from_nothing:
            bits = np.zeros(stop - start, self.spec.bits_dtype)
            before = OldBits(bits, start, np.zeros(stop - start, np.bool_))
        else:
            return None
        return before.after(deltas)

    def steps(
        self, low: int, high: int, old: Callable[[int, int], OldBits] | None = None
    ) -> TensorReader | None:
        """Return the reader of the segments near ``[low, high)`` if one object has steps of all.

        ``None`` for a tensor plan that has to be folded, or is stored otherwise.
        """
        (part, *more), name = self.parts or (None,), self.spec.name
        if part is None or more or self.base is not None or self.from_nothing:
            return None
        if not ENCODINGS.get(part.rows[name].encoding).stages:
            return None
        before = self._before((), low, high, old) if part.needs_old(name) else None
        return part.reader(name, (low, high), old=before)


class SpoolReader:
    """Reader of a spool, for ranks; objects are mapped, and read where they lie.

    ``abandon`` is called while an object is awaited, and returns whether to stop.
    """

    def __init__(self, folder: Path, abandon: Callable[[], bool] = lambda: False) -> None:
        self._folder = folder
        self._abandon = abandon
        try:
            self._index = read_index(folder)
        except OSError as exc:
            raise errors.ApplyError(f"the spool {folder.name} is gone: {exc.strerror}") from exc
        self.from_nothing = self._index.from_nothing
        self._base = Checkpoint(Path(self._index.base)) if self._index.base else None

    def tensor_plans(self) -> Iterator[TensorPlan]:
        """Yield every tensor plan of the plan, as soon as all of its objects are there."""
        return cast("Iterator[TensorPlan]", self.plans((), frozenset()))

    def plans(
        self, stagers: "Sequence[Stager]", absent: Collection[str]
    ) -> "Iterator[TensorPlan | GroupPlan]":
        """Yield groups of tensors that stagers take, and tensor plans of others.

        Each is yielded as soon as all of its objects are there; tensors that are ``absent`` are
        left out.
        """
        folds = self._base is not None or len({one.edge for one in self._index.objects}) > 1
        alone = () if folds or self.from_nothing else stagers
        later: dict[str, list[tuple[int, Part]]] = {}
        specs: dict[str, TensorSpec] = dict(self._base.specs) if self._base else {}
        opened: list[tuple[int, Part]] = []
        for number, spooled in enumerate(self._index.objects):
            part = self._open(number, spooled)
            opened.append((spooled.edge, part))
            others = (yield from _grouped(opened[-1:], alone)).union(absent)
            for name, row in part.rows.items():
                if name in others:
                    continue
                if folds or self._waits(part, name):
                    later.setdefault(name, []).append((spooled.edge, part))
                    specs.setdefault(name, row.spec)
                else:
                    yield TensorPlan(row.spec, (part,), None, self.from_nothing)
        together = [one for one in stagers if one.folds and not (self._base or self.from_nothing)]
        others = (yield from _grouped(opened, together if folds else ())).union(absent)
        for name in [name for name in specs if name not in others]:
            edges, parts = zip(*later[name], strict=True) if name in later else ((), ())
            yield TensorPlan(specs[name], parts, self._base, self.from_nothing, edges)

    def _waits(self, part: Part, name: str) -> bool:
        """Return whether a tensor of a plan of one edge is decoded with those of later objects."""
        if self.from_nothing:
            row = part.rows[name]
            return ENCODINGS.get(row.encoding).sparse or row.nnz != row.spec.numel
        return part.needs_old(name) and len(self._index.objects) > 1

    def _open(self, number: int, spooled: SpooledObject) -> Part:
        file, ref = object_file(self._folder, number), spooled.ref
        self._await(file, ref.key)
        part = Part.from_bytes(map_file(file), key=ref.key)
        if part.digest != ref.directory:
            raise errors.DigestMismatchError(
                f"{ref.key}: directory", expected=ref.directory, actual=part.digest, key=ref.key
            )
        return part

    def _await(self, file: Path, key: str) -> None:
        wait, longest = POLL_S
        while not file.exists():
            ended = writer_is_gone(self._folder)  # looked at first: a writer may just have finished
            if file.exists():
                return
            failed = self._folder / FAILED
            if failed.exists() or ended:
                why = "the process that fetched it has ended"
                why = failed.read_text(errors="replace") if failed.exists() else why
                raise errors.ApplyError(f"{key} was not fetched: {why}")
            if self._abandon():
                message = f"{key} has not arrived, and the rank cannot wait for it"
                raise errors.StageAbandonedError(message)
            time.sleep(wait)
            wait = min(2 * wait, longest)


def _grouped(
    objects: Sequence[tuple[int, Part]], stagers: "Sequence[Stager]"
) -> "Generator[GroupPlan, None, set[str]]":
    """Yield the groups of tensors that stagers take; return the names of these."""
    taken: set[str] = set()
    for stager in stagers:
        groups, names = stager.groups(objects)
        yield from groups
        taken |= names
    return taken
