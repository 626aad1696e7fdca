"""Pipeline of a mirror: objects are read ahead, proven in order, and put beside one another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from threading import Event
from typing import Any, Final

from deltachain.errors import (
    AlreadyExistsError,
    DeltaChainError,
    DigestMismatchError,
    ForkedChainError,
    FormatError,
    ObjectNotFoundError,
    StoreUnavailableError,
)
from deltachain.format.documents import EdgeRecord, unseal
from deltachain.format.keys import EDGE_PREFIX, object_digest
from deltachain.mirror.plan import ObjectCopy
from deltachain.store import Buffer, Store
from deltachain.threads import Pool

THREADS: Final = 8
"""Objects read at a time, and as many written: enough to fill a link between two regions."""

AHEAD: Final = 64
"""Objects on the way at most."""

AHEAD_NBYTES: Final = 1 << 30
"""Bytes on the way at most, but for a single object that is larger."""


@dataclass(frozen=True, slots=True)
class CopyOutcome:
    """What became of one copy.

    Attributes:
        copy: The object.
        nbytes: Bytes written; 0 if the mirror had the object already.
        is_lost: Whether the source does not have it any more.
        is_other: Whether the mirror has another record of the same edge, which is kept.
    """

    copy: ObjectCopy
    nbytes: int
    is_lost: bool = False
    is_other: bool = False


@dataclass(slots=True)
class _Read:
    """What was read of an object; no content if the mirror has it, or the source has it no more."""

    content: Buffer | None
    is_lost: bool = False


@dataclass(slots=True)
class _Job:
    """A copy on its way."""

    copy: ObjectCopy
    reading: Future[_Read]
    writing: Future[CopyOutcome] | None = None


class CopyPipeline:
    """Copies objects in the order of dependence, with bounded memory.

    Nothing is put before everything before it was proven, and no document before everything before
    it was put. So the mirror of a forged source ends before the forgery, and a process that is
    killed leaves no document whose objects are missing.

    Args:
        source: Store that is read.
        destination: Store of the mirror.
        may_be_there: Returns whether the mirror may have an object already, so that its digest is
            compared before it is copied.
    """

    def __init__(
        self, source: Store, destination: Store, *, may_be_there: Callable[[ObjectCopy], bool]
    ) -> None:
        self._source, self._destination = source, destination
        self._may_be_there = may_be_there
        self._abandoned = Event()

    def run(self, copies: Iterable[ObjectCopy], stop: Event) -> Iterator[CopyOutcome]:
        """Copy objects; yield each once it is in the mirror.

        Args:
            copies: The objects, in the order of dependence.
            stop: Ends the copying, once what was read is put.

        Raises:
            FormatError: An object is not what its document says; all before it were copied.
            ForkedChainError: The mirror has another document in its place.
            StoreError: A store failed.
        """
        self._abandoned.clear()
        reading, writing = deque[_Job](), deque[_Job]()
        upcoming, ahead = iter(copies), None
        failure: DeltaChainError | None = None
        is_open = True
        with (
            Pool(THREADS, "deltachain-read") as readers,
            Pool(THREADS, "deltachain-write") as puts,
            Pool(1, "deltachain-commit") as commits,  # does not wait for parts of later versions
        ):
            try:
                while is_open or reading or writing:
                    try:
                        while is_open and not stop.is_set():
                            ahead = ahead or next(upcoming, None)
                            if ahead is None or not _has_room(ahead, (*reading, *writing)):
                                is_open = ahead is not None
                                break
                            reading.append(_Job(ahead, readers.submit(self._read, ahead)))
                            ahead = None
                    except DeltaChainError as exc:  # what was proven before it is still copied
                        failure, is_open = exc, False
                    if stop.is_set():
                        is_open = False
                        reading.clear()
                    try:
                        self._pass_on(reading, writing, puts)
                    except DeltaChainError as exc:
                        failure, is_open = exc, False
                        reading.clear()
                    yield from self._written(writing, commits)
                    _wait(reading, writing)
            finally:
                self._abandoned.set()
        if failure is not None:
            raise failure

    def _pass_on(self, reading: deque[_Job], writing: deque[_Job], puts: Pool) -> None:
        """Begin to write objects that are proven, as all before them are."""
        while reading and reading[0].reading.done():
            job = reading[0]
            job.reading.result()
            reading.popleft()
            writing.append(job)
            if not job.copy.is_document:
                job.writing = puts.submit(self._put, job.copy, job.reading)

    def _written(self, writing: deque[_Job], commits: Pool) -> Iterator[CopyOutcome]:
        """Yield what is in the mirror, and begin to write a document that is next."""
        while writing:
            job = writing[0]
            if job.writing is None:
                job.writing = commits.submit(self._put, job.copy, job.reading)
            if not job.writing.done():
                return
            outcome = job.writing.result()
            writing.popleft()
            yield outcome

    def _read(self, copy: ObjectCopy) -> _Read:
        """Read and prove an object; once more if it is corrupt."""
        if self._abandoned.is_set():
            raise StoreUnavailableError("the copy was abandoned", key=copy.key)
        if copy.content is not None:
            return _Read(copy.content)
        if self._may_be_there(copy) and self._is_there(copy):
            return _Read(None)
        try:
            return _Read(_proven(self._source, copy))
        except ObjectNotFoundError:
            return _Read(None, is_lost=True)
        except FormatError:  # a bit may have flipped in transit
            return _Read(_proven(self._source, copy))

    def _is_there(self, copy: ObjectCopy) -> bool:
        """Return whether the mirror has the object with its digest."""
        try:
            _proven(self._destination, replace(copy, pin=""))
        except (ObjectNotFoundError, FormatError):
            return False
        return True

    def _put(self, copy: ObjectCopy, reading: Future[_Read]) -> CopyOutcome:
        """Write an object into the mirror."""
        read = reading.result()
        data, read.content = read.content, None
        if data is None:
            return CopyOutcome(copy, 0, is_lost=read.is_lost)
        if not copy.is_document:
            self._destination.put(copy.key, data)
            return CopyOutcome(copy, copy.nbytes)
        try:
            self._destination.put_if_absent(copy.key, data)
        except AlreadyExistsError:
            there = self._destination.get(copy.key)
            if not there:  # left by a writer that was killed; see `mirror/contents.py`
                self._destination.put(copy.key, data)
                return CopyOutcome(copy, copy.nbytes)
            is_other = there != data
            if is_other and not _is_of_same_edge(copy.key, data, there):
                raise ForkedChainError(
                    f"{self._destination.url} has another {copy.key} than {self._source.url}",
                    version=copy.version,
                    hint="if a publisher continued here, this is not a mirror any more; if the "
                    "object is damaged, delete it and mirror again",
                ) from None
            return CopyOutcome(copy, 0, is_other=is_other)
        return CopyOutcome(copy, copy.nbytes)


def _is_of_same_edge(key: str, one: Buffer, other: Buffer) -> bool:
    """Return whether two objects are records of the same edge, such as one that was made again."""
    if not key.startswith(EDGE_PREFIX):
        return False
    try:
        found = {_edge_of(unseal(bytes(data), EdgeRecord, key=key)) for data in (one, other)}
    except FormatError:
        return False
    return len(found) == 1


def _edge_of(record: EdgeRecord) -> tuple[object, ...]:
    """Return what tells an edge from others, but not how it is stored."""
    edge = record.edge
    states = (record.manifest, record.base_state, record.state)
    return record.chain, record.version, edge.kind, edge.base, *states


def _has_room(copy: ObjectCopy, on_the_way: Sequence[_Job]) -> bool:
    """Return whether an object may be read now."""
    nbytes = sum(job.copy.nbytes for job in on_the_way)
    return not on_the_way or (len(on_the_way) < AHEAD and nbytes + copy.nbytes <= AHEAD_NBYTES)


def _wait(reading: deque[_Job], writing: deque[_Job]) -> None:
    """Wait until the first object is read, or the first of others is written."""
    futures: list[Future[Any]] = [reading[0].reading] if reading else []
    futures += [writing[0].writing] if writing and writing[0].writing else []
    if futures:
        wait(futures, return_when=FIRST_COMPLETED)


def _proven(store: Store, copy: ObjectCopy) -> Buffer:
    """Read an object and compare its digest.

    Raises:
        DigestMismatchError: It has another digest.
    """
    data = store.read(copy.key, nbytes=copy.nbytes, pin=copy.pin)
    actual = object_digest(data)
    if actual != copy.digest:
        raise DigestMismatchError(copy.key, expected=copy.digest, actual=actual, key=copy.key)
    return data
