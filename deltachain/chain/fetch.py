"""Fetch and verify every object of a plan; decode tensors on demand.

Compressed parts stay in memory, or in files without a name, and are decoded tensor by tensor, so a
plan of any length takes the memory of its wire bytes, or none, plus a few tensors.
"""

import logging
import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Final, Protocol

import numpy as np

from deltachain import errors
from deltachain.chain.chain import Chain, Committed
from deltachain.chain.checks import check_encodings
from deltachain.chain.plan import Plan
from deltachain.chain.tensor_plan import TensorPlan
from deltachain.checkpoint import Checkpoint
from deltachain.codec import Part
from deltachain.codec.container import ReadAt
from deltachain.codec.decode import Range, check_ranges, joined, stored_ranges
from deltachain.delta import OldBits, Piece, TensorDelta, pieces
from deltachain.disk_space import check_room
from deltachain.format.documents import BaseRef, Edge, ObjectRef
from deltachain.format.keys import digest_key, digest_of_pieces, object_digest
from deltachain.kernels import host
from deltachain.store import Store
from deltachain.store.base import check_nbytes, not_found
from deltachain.threads import Pool, cores
from deltachain.types import Bits, Buffer, FoundSpec, StateDigest, TensorSpec, mismatch

LOST: Final = (
    "a lifecycle rule or a user removed it: restore it from a backup, or restart the publisher, "
    "whose next anchor makes it unnecessary"
)
"""Hint for a missing part without an alternative plan."""

LARGE: Final = 8 << 20
"""Size of an object in bytes above which fresh memory for it costs more than to read it twice."""

MOST_HELD: Final = 64 << 20  # bytes of small objects that are in memory if there is a file

PIECE: Final = 1 << 20
"""Bytes of a large object that are read at a time: they stay in cache while they are hashed."""

RANGE: Final = 4 << 20
RANGES: Final = 2
"""Bytes of a large object that are written to a file at a time, and threads that do."""

FRONT: Final = 1 << 20  # bytes read at first: header and directory of most objects
WHOLE: Final = 0.8
"""Share above which objects are fetched whole: one request, and one digest for all."""

logger = logging.getLogger(__name__)


class StoredObject(Protocol):
    @property
    def key(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def pin(self) -> str: ...


def scratch() -> Path:
    """Return the folder of files for objects and weights that a command reads."""
    return Path(tempfile.gettempdir())


class Room:
    """A file without a name for objects on their way, while ``spare`` bytes stay free beside it.

    No other process can cut it, nor finds it after a kill.
    """

    def __init__(self, folder: Path, spare: int) -> None:
        self._folder, self._spare = folder, spare
        self._taking, self._held, self._end = Lock(), 0, 0
        self._file = -1

    def holds(self, nbytes: int) -> bool:
        """Return whether a small object is held in memory instead, as the first of them are."""
        with self._taking:
            fits = nbytes <= LARGE and self._held + nbytes <= MOST_HELD
            self._held += nbytes if fits else 0
            return fits

    def take(self, nbytes: int) -> int:
        """Return the offset of new room in the file; raise an ``OSError`` if there is none."""
        with self._taking:
            check_room(self._folder, nbytes + self._spare)
            if self._file < 0:
                with tempfile.TemporaryFile(dir=self._folder, prefix=".", suffix=".part") as file:
                    self._file = os.dup(file.fileno())
                weakref.finalize(self, os.close, self._file)
            at = self._end
            self._end += nbytes + -nbytes % mmap.ALLOCATIONGRANULARITY
            return at

    def fill(self, store: Store, ref: StoredObject) -> int:
        at = self.take(ref.nbytes)
        if ref.pin or ref.nbytes <= LARGE:  # content is not read in ranges
            self.write(_read(store, ref), at)
            return at
        _check_there(store, ref)

        def copy(start: int) -> None:
            length = min(RANGE, ref.nbytes - start)
            self.write(store.get_range(ref.key, start, length), at + start)

        with Pool(RANGES) as pool:
            for _ in pool.map(copy, range(0, ref.nbytes, RANGE)):
                pass
        return at

    def map(self, at: int, nbytes: int) -> memoryview:
        return memoryview(mmap.mmap(self._file, nbytes, access=mmap.ACCESS_READ, offset=at))

    def write(self, data: Buffer, at: int) -> None:
        left = memoryview(data)
        while left:
            done = os.pwrite(self._file, left, at)
            left, at = left[done:], at + done

    def read(self, at: int, start: int, length: int) -> memoryview:
        data = np.empty(length, np.uint8).data
        done = os.preadv(self._file, [data], at + start)
        return data[:done]


def fetch_part(
    store: Store,
    ref: ObjectRef,
    corrupt: list[str] | None = None,
    *,
    hold: bool = True,
    room: Room | None = None,
    wanted: Mapping[str, Range] | None = None,
) -> Part:
    """Fetch and verify a part, once more if it is corrupt.

    ``wanted`` has the range of flat indices of each tensor that is read; others are not fetched.
    Empty for whole objects.
    """
    if wanted and (some := _wanted(store, ref, wanted)) is not None:
        return some
    get: Callable[[Store, ObjectRef], Part] = _held
    if ref.nbytes > LARGE and not hold and store.capabilities.cheap_ranges:
        get = _in_store
    elif room is not None and not room.holds(ref.nbytes):
        get = partial(_in_file, room)
    try:
        return get(store, ref)
    except errors.UnsupportedFormatError:
        raise
    except errors.FormatError:
        if corrupt is not None:
            corrupt.append(ref.key)
        return get(store, ref)


def _wanted(store: Store, ref: ObjectRef, wanted: Mapping[str, Range]) -> Part | None:
    """Fetch and verify what is wanted of an object; ``None`` if it is to be fetched whole."""
    if ref.nbytes <= FRONT:
        return None
    front = memoryview(store.get_range(ref.key, 0, FRONT))
    read: list[tuple[int, Buffer]] = [(0, front)]

    def read_at(start: int, length: int) -> Buffer:
        for at, data in read:
            if at <= start and start + length <= at + len(data):
                return memoryview(data)[start - at : start - at + length]
        return store.get_range(ref.key, start, length)

    try:
        part = _checked(Part(read_at, ref.nbytes, key=ref.key), ref)
        ranges = joined([(0, part.front_nbytes), *stored_ranges(part, wanted)])
        if sum(stop - start for start, stop in ranges) > WHOLE * ref.nbytes:
            return None
        read[:] = [(start, read_at(start, stop - start)) for start, stop in ranges]
        check_ranges(part, wanted)
    except errors.FormatError:
        return None  # corrupt at the first read: the whole object is proven by its digest
    part.ranges = read
    return part


def _held(store: Store, ref: ObjectRef) -> Part:
    return _proven(_read(store, ref), ref)


def _proven(data: Buffer, ref: ObjectRef) -> Part:
    _check_digest(ref.key, ref.blake3, object_digest(data), ref.key)
    return _checked(Part.from_bytes(data, key=ref.key), ref)


def _in_file(room: Room, store: Store, ref: ObjectRef) -> Part:
    try:
        return _in_ranges(partial(room.read, room.fill(store, ref)), ref)
    except errors.DeltaChainError:  # some of its subclasses are OSErrors too
        raise
    except OSError as exc:
        logger.info("%s is held in memory: %s", ref.key, exc)
    return _held(store, ref)


def _check_there(store: Store, ref: StoredObject) -> None:
    info = store.find(ref.key)
    if info is None:
        missing = not_found(ref.key, store.url)
        missing.hint = LOST
        raise missing
    check_nbytes(ref.key, store.url, expected=ref.nbytes, actual=info.nbytes)


def _in_store(store: Store, ref: ObjectRef) -> Part:
    _check_there(store, ref)
    return _in_ranges(partial(store.get_range, ref.key), ref)


def _in_ranges(read_at: ReadAt, ref: ObjectRef) -> Part:
    starts = range(0, ref.nbytes, PIECE)
    reads = (memoryview(read_at(at, min(PIECE, ref.nbytes - at))) for at in starts)
    _check_digest(ref.key, ref.blake3, digest_of_pieces(reads), ref.key)
    return _checked(Part(read_at, ref.nbytes, key=ref.key), ref)


def _read(store: Store, ref: StoredObject) -> Buffer:
    try:
        return store.read(ref.key, nbytes=ref.nbytes, pin=ref.pin)
    except errors.ObjectNotFoundError as exc:
        exc.hint = LOST
        raise


def _checked(part: Part, ref: ObjectRef) -> Part:
    _check_digest(f"{ref.key}: directory", ref.directory, part.digest, ref.key)
    return part


def _check_digest(what: str, expected: str, actual: str, key: str) -> None:
    if actual != expected:
        raise errors.DigestMismatchError(what, expected=expected, actual=actual, key=key)


THREADS: Final = 8
"""Objects fetched at a time: enough to fill a link with tens of milliseconds of latency."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One object of a plan, and its part once it has been fetched and verified."""

    ref: ObjectRef
    edge: int
    part: Future[Part]


@dataclass(frozen=True, slots=True)
class Fetched:
    """The objects of a plan, oldest first; some may still be on their way.

    Properties and methods that need a part wait for it, and raise what :func:`fetching` raises.
    """

    plan: Plan
    specs: Mapping[str, TensorSpec]
    base: Checkpoint | None  # checkpoint of a `base` edge; `None` for other plans
    arrivals: tuple[Arrival, ...]
    nbytes: int  # fetched bytes
    times: list[float]
    corrupt: list[str]
    # Part of an anchor with all elements of a tensor that `arriving` yielded early.
    early: dict[str, Part] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(arrival.part.result() for arrival in self.arrivals)

    @property
    def refetched(self) -> tuple[str, ...]:
        return tuple(self.corrupt)

    @property
    def from_nothing(self) -> bool:
        """Whether the plan needs no base bits, so that every tensor decodes to dense bits."""
        return bool(self.plan.edges) and self.plan.edges[0].base is None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of changed tensors, in the order of the table."""
        if self.base is not None:
            return tuple(self.specs)
        touched = {name for part in self.parts for name in part.rows}
        return tuple(name for name in self.specs if name in touched)

    def arriving(self) -> Iterator[str]:
        """Yield the names of changed tensors, each when :meth:`read` need not wait for objects.

        A tensor of which an object of an anchor has all elements is not in other objects of it.
        """
        whole: set[str] = set()
        if self.from_nothing and self.base is None:
            later = [arrival.part.result() for arrival in self.arrivals if arrival.edge]
            for arrival in self.arrivals[: len(self.arrivals) - len(later)]:
                part = arrival.part.result()
                for name, row in part.rows.items():
                    if row.nnz == self.specs[name].numel and name not in whole:
                        self.early[name] = part
                        whole.add(name)
                        yield name
        yield from (name for name in self.names if name not in whole)

    def read(self, name: str, old: Callable[[], Bits] | None = None) -> TensorDelta:
        """Decode the delta of one tensor, folded over the whole plan."""
        bits = None if old is None else lambda *_: OldBits(old(), shared=True)
        return self.tensor_plan(name).read(0, self.specs[name].numel, bits)

    def tensor_plan(self, name: str) -> TensorPlan:
        """Return what the plan says of one tensor, once all of its objects are there."""
        early = self.early.get(name)
        given = [] if early is None else [(0, early)]  # others of the edge may be on their way
        for arrival in self.arrivals:
            if arrival.edge or early is None:
                given += [(arrival.edge, p) for p in (arrival.part.result(),) if name in p.rows]
        edges, parts = tuple(edge for edge, _ in given), tuple(part for _, part in given)
        return TensorPlan(self.specs[name], parts, self.base, self.from_nothing, edges)

    def deltas(self) -> Iterator[TensorDelta]:
        """Yield the folded delta of each changed tensor in order, decoded ahead in threads.

        At most two tensors a core are decoded ahead.
        """
        with Pool(cores()) as pool:
            yield from pool.ordered(self.read, self.names, ahead=2 * cores())

    def state(self) -> StateDigest:
        """Compute the state digest that a plan from nothing leads to."""
        given = frozenset(self.names)
        for name in self.specs.keys() - given:
            raise errors.BrokenChainError(f"{name}: the plan does not contain the whole tensor")
        with Pool(cores()) as pool:
            digests = pool.ordered(self._digest, pieces(self.specs.values()), ahead=2 * cores())
            return sum(digests, StateDigest())

    def _digest(self, piece: Piece) -> StateDigest:
        key, found = digest_key(piece.spec), self.tensor_plan(piece.spec.name).windows(piece)
        parts = (host.digest(key, delta.values, window.low) for window, delta in found)
        return sum(parts, StateDigest())


@contextmanager
def fetching(  # noqa: PLR0913 - settings of a fetch
    chain: Chain,
    plan: Plan,
    *,
    target: Committed | None = None,
    base: Path | None = None,
    hold: bool = True,
    room: Path | None = None,
    wanted: Mapping[str, Range] | None = None,
) -> Iterator[Fetched]:
    """Fetch every object of a plan in threads, while the plan is used.

    Objects that nobody has begun to fetch when the context ends are not fetched. Without ``hold``
    each tensor must be decoded once only: large objects of an edge from nothing are then verified
    without being held in memory, where the store has cheap ranges, and read again as they are
    decoded. Others are held in a file without a name in the folder ``room``, if given and while it
    has room for the weights beside them, unless it is :func:`scratch`; the first small ones in
    memory. ``wanted`` is as in :func:`fetch_part`.
    """
    specs = {spec.name: spec for spec in chain.table.specs()}
    filled = sum(spec.nbytes for spec in specs.values()) if room != scratch() else 0
    beside = Room(room, filled) if room else None
    chain.look_ahead(plan)
    edges = [chain.edge(summary, target) for summary in plan.edges]
    reference = edges[0].reference if edges else None
    checkpoint = None if reference is None else open_base(reference, base)
    if checkpoint is not None:
        path = str(checkpoint.path)
        _check_specs(specs, "the chain", checkpoint.specs, path, key=path)
    refs = [(ref, number) for number, edge in enumerate(edges) for ref in edge.parts]
    corrupt: list[str] = []
    times: list[float] = []

    def get(ref: ObjectRef, edge: Edge) -> Part:
        held = hold or edge.base is not None
        part = fetch_part(chain.store, ref, corrupt, hold=held, room=beside, wanted=wanted)
        check_encodings(edge, (row.encoding for row in part.rows.values()), ref.key)
        rows = {name: (row.dtype, row.shape) for name, row in part.rows.items()}
        _check_specs(rows, ref.key, specs, "the chain", key=ref.key)
        times.append(time.perf_counter())
        return part

    with Pool(min(THREADS, len(refs))) as pool:
        # Those of an anchor come last: its tensors are decoded as they come, if the rest is there.
        order = sorted(range(len(refs)), key=lambda number: not refs[number][1])
        begun = {n: pool.submit(get, refs[n][0], edges[refs[n][1]]) for n in order}
        arrivals = tuple(Arrival(ref, edge, begun[n]) for n, (ref, edge) in enumerate(refs))
        try:
            yield Fetched(plan, specs, checkpoint, arrivals, plan.nbytes, times, corrupt)
        finally:
            for arrival in arrivals:
                arrival.part.cancel()


def open_base(reference: BaseRef, folder: Path | None) -> Checkpoint:
    """Open the checkpoint of a base reference and verify the digests of its files.

    A path that a store names is never opened: who writes there would choose what is read here.
    """
    what = repr((reference.repo or reference.path)[:80])
    hint = f"give the folder of the base checkpoint {what}: --base, or DELTACHAIN_BASE in engines"
    if folder is None:
        raise errors.ConfigError(
            f"the chain starts from a base checkpoint, {what}, and no folder of it was given",
            hint=hint,
        )
    path = folder
    try:
        there = path.exists()
    except (OSError, ValueError) as exc:  # a path that is invalid on this machine
        raise errors.ConfigError(f"base checkpoint {str(path)[:80]!r}: {exc}", hint=hint) from exc
    if not there:
        raise errors.ConfigError(f"base checkpoint {path} does not exist", hint=hint)
    checkpoint = Checkpoint(path)
    found = {ref.name: ref for ref in checkpoint.files()}
    for ref in reference.files:
        have = found.get(ref.name)
        if have != ref:
            raise errors.DigestMismatchError(
                f"{path / ref.name}",
                expected=ref.blake3,
                actual=have.blake3 if have else "no such file",
                key=ref.name,
                hint=hint,
            )
    return checkpoint


def _check_specs(
    needed: Mapping[str, FoundSpec],
    where: str,
    known: Mapping[str, TensorSpec],
    there: str,
    *,
    key: str,
) -> None:
    for name, spec in needed.items():
        if message := mismatch(name, spec, where, known.get(name), there):
            raise errors.MalformedError(message, key=key)
