"""Reader of a spool: what a plan says of each tensor, as its objects arrive.

A *tensor plan* is what a plan says of one tensor. In a plan of one edge every object gives elements
of its own (FORMAT.md 2): each of its tensors is decoded by itself, while later objects are on their
way, unless it needs old bits that another object may change. Longer plans are folded, tensor by
tensor, once all objects are there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from deltachain.checkpoint import Checkpoint
from deltachain.codec import ENCODINGS, Part
from deltachain.codec.container import SEGMENT
from deltachain.codec.old_bits import OldBits
from deltachain.codec.tensor_reader import TensorReader
from deltachain.delta import TensorDelta, fold_within
from deltachain.errors import (
    ApplyError,
    BaseMismatchError,
    BrokenChainError,
    DigestMismatchError,
    MalformedError,
    StageAbandonedError,
)
from deltachain.file_reader import map_file
from deltachain.kernels import host
from deltachain.kernels.protocol import kernels_for
from deltachain.replica.spool import (
    FAILED,
    SpooledObject,
    object_file,
    read_index,
    writer_is_gone,
)
from deltachain.subscribe.targets.patch import LiveElements
from deltachain.types import TensorSpec


class _Run(NamedTuple):
    """Elements that are consecutive in the tensor and in its storage.

    Attributes:
        start: Flat index of the first one.
        at: Its position in the storage.
        numel: How many there are.
    """

    start: int
    at: int
    numel: int


def host_bits(places: Sequence[LiveElements], spec: TensorSpec, low: int, high: int) -> OldBits:
    """Return bits of the elements ``[low, high)`` that a rank holds, on the host.

    Where those that it holds are consecutive, only these are returned, on the host the live bits
    themselves; others are copied to their places.

    Args:
        places: Live elements of the tensor, at least one, all in that range.
        spec: Spec of the tensor.
        low: Flat index of the first element.
        high: Flat index after the last one.
    """
    run, nothing = _run(places), np.empty(0, spec.bits_dtype)
    if run is not None:
        storage: Any = places[0].storage
        live = storage[run.at : run.at + run.numel]
        return OldBits(host.receive(live, nothing), run.start, shared=True)
    bits = np.zeros(high - low, spec.bits_dtype)
    for place in places:
        here, live = _views(place, bits, low)
        here[...] = host.receive(live, nothing)
    return OldBits(bits, low, _mask(places, low, high))


def _run(places: Sequence[LiveElements]) -> _Run | None:
    first, *others = places
    if others:
        return None
    offset, at, dims = first.box
    numel = 1
    for size, there, live in reversed(dims.tolist()):
        if size > 1 and (there, live) != (numel, numel):
            return None
        numel *= size
    return _Run(offset, at, numel)


def _mask(places: Sequence[LiveElements], low: int, high: int) -> npt.NDArray[np.bool_]:
    held = np.zeros(high - low, np.bool_)
    for place in places:
        _views(place, held, low)[0][...] = True
    return held


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
    """Changes of one tensor by a plan, or by one object of a plan of one edge.

    Attributes:
        spec: Spec of the tensor.
        parts: Open objects that give elements of the tensor, oldest first.
        edges: Number of the edge of each object; by default, each has an edge of its own.
        base: Checkpoint with its bits before them; ``None`` if there is none.
        from_nothing: Whether the plan needs no base bits.
    """

    spec: TensorSpec
    parts: tuple[Part, ...]
    base: Checkpoint | None = field(default=None, repr=False)
    from_nothing: bool = False
    edges: tuple[int, ...] = ()

    @property
    def needs_old(self) -> bool:
        name = self.spec.name
        return not self.from_nothing and any(part.needs_old(name) for part in self.parts)

    def read(
        self, low: int, high: int, old: Callable[[int, int], OldBits] | None = None
    ) -> TensorDelta:
        """Verify, inflate and decode the segments near the elements ``[low, high)``, folded.

        Args:
            low: Flat index of the first element.
            high: Flat index after the last one.
            old: Function that returns the bits held of a range of elements, for encodings that need
                them; a plan from nothing needs none.

        Returns:
            Some elements outside may be there too. From nothing: a run of exactly these elements,
                or of more.

        Raises:
            BrokenChainError: A plan from nothing has only some of the elements.
            BaseMismatchError: An object cannot be decoded with the bits that ``old`` returned.
            OldBitsError: An object needs old bits that are not held.
        """
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
        found = fold_within(deltas, low, high) if deltas else _empty(self.spec)
        if self.from_nothing and low < high and not found.covers(low, high):
            raise BrokenChainError(f"{name}: the plan from nothing gives only {found.nnz} elements")
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
        start, stop = near(self.spec, low, high)
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


def near(spec: TensorSpec, low: int, high: int) -> tuple[int, int]:
    """Return the range of the elements of all segments near the elements ``[low, high)``."""
    return max(0, low - SEGMENT), min(spec.numel, high + SEGMENT)


@contextmanager
def bits_are_at_fault(name: str) -> Iterator[None]:
    """Raise :exc:`BaseMismatchError` where an encoding that needs old bits cannot be decoded."""
    try:
        yield
    except MalformedError as exc:
        what = f"{name!r} does not hold the bits before {exc}"
        raise BaseMismatchError(what, tensor=name) from exc


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
            raise ApplyError(f"the spool {folder.name} is gone: {exc.strerror}") from exc
        self.from_nothing = self._index.from_nothing
        self._base = Checkpoint(Path(self._index.base)) if self._index.base else None

    def tensor_plans(self) -> Iterator[TensorPlan]:
        """Yield every tensor plan of the plan, as soon as all of its objects are there.

        Raises:
            ApplyError: An object will not come.
            StageAbandonedError: An object has not arrived, and ``abandon`` says not to wait.
        """
        folds = self._base is not None or len({one.edge for one in self._index.objects}) > 1
        later: dict[str, list[tuple[int, Part]]] = {}
        specs: dict[str, TensorSpec] = dict(self._base.specs) if self._base else {}
        for number, spooled in enumerate(self._index.objects):
            part = self._open(number, spooled)
            for name, row in part.rows.items():
                if folds or self._waits(part, name):
                    later.setdefault(name, []).append((spooled.edge, part))
                    specs.setdefault(name, row.spec)
                else:
                    yield TensorPlan(row.spec, (part,), None, self.from_nothing)
        for name, spec in specs.items():
            edges, parts = zip(*later[name], strict=True) if name in later else ((), ())
            yield TensorPlan(spec, parts, self._base, self.from_nothing, edges)

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
            raise DigestMismatchError(
                f"{ref.key}: directory", expected=ref.directory, actual=part.digest, key=ref.key
            )
        return part

    def _await(self, file: Path, key: str) -> None:
        wait, longest = POLL_S
        while not file.exists():
            ended = writer_is_gone(self._folder)  # looked at first: a writer may just have finished
            if file.exists():
                return
            if (self._folder / FAILED).exists():
                why = (self._folder / FAILED).read_text(errors="replace")
                raise ApplyError(f"{key} was not fetched: {why}")
            if ended:
                raise ApplyError(f"{key} was not fetched: the process that fetched it has ended")
            if self._abandon():
                raise StageAbandonedError(f"{key} has not arrived, and the rank cannot wait for it")
            time.sleep(wait)
            wait = min(2 * wait, longest)


def _empty(spec: TensorSpec) -> TensorDelta:
    values = np.empty(0, spec.bits_dtype)
    return TensorDelta(spec=spec, indices=np.empty(0, np.int64), values=values)
