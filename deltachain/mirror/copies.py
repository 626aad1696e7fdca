"""Copies of objects: read ahead, proven in order, and put beside one another."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from threading import Event
from typing import Final

from deltachain import errors
from deltachain.chain.checks import check_digest, once_more
from deltachain.format.documents import Edge
from deltachain.format.keys import EDGE_PREFIX
from deltachain.store import Buffer, Store
from deltachain.threads import Pool
from deltachain.types import Version

THREADS: Final = 8
"""Objects read at a time, and as many written: enough to fill a link between two regions."""

AHEAD: Final = 64
"""Objects on the way at most."""

AHEAD_NBYTES: Final = 1 << 30
"""Bytes on the way at most, but for a single object that is larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectCopy:
    """One object to copy.

    Attributes:
        nbytes: Its length in bytes.
        digest: blake3 that its content must have; empty for a document.
        content: Its bytes, if it is a document, which was read and proven already.
        version: The version that names it; ``None`` for the identity of the chain.
        edge: The edge that it is a part of; ``None`` for others.
    """

    key: str
    nbytes: int
    digest: str = ""
    pin: str = ""
    content: bytes | None = None
    version: Version | None = None
    edge: Edge | None = None

    @property
    def is_document(self) -> bool:
        return self.content is not None


@dataclass(frozen=True, slots=True)
class CopyOutcome:
    """What became of one copy."""

    copy: ObjectCopy
    nbytes: int
    is_lost: bool = False
    is_other: bool = False


class CopyPipeline:
    """Copies objects in the order of dependence, with bounded memory.

    Nothing is put before everything before it was proven, and no document before everything before
    it was put. So the mirror of a forged source ends before the forgery, and a process that is
    killed leaves no document whose objects are missing.
    """

    def __init__(
        self, source: Store, destination: Store, may_be_there: Callable[[ObjectCopy], bool]
    ) -> None:
        self._source, self._destination = source, destination
        self._may_be_there = may_be_there
        self._reading = deque[tuple[ObjectCopy, "Future[Buffer | CopyOutcome]"]]()
        self._writing = deque[tuple[ObjectCopy, "Future[CopyOutcome]"]]()
        self._abandoned = Event()

    def run(self, copies: Iterable[ObjectCopy], stop: Event) -> Iterator[CopyOutcome]:
        """Copy objects; yield each once it is in the mirror."""
        failures: list[errors.DeltaChainError] = []
        with (
            Pool(THREADS, "deltachain-read") as readers,
            Pool(THREADS, "deltachain-write") as writers,
        ):
            try:
                for copy in _until_failure(copies, failures):
                    if stop.is_set():
                        self._reading.clear()
                        break
                    while not self._has_room(copy):
                        yield from self._go_on(writers)
                    self._reading.append((copy, readers.submit(self._read, copy)))
                while self._reading or self._writing:
                    yield from self._go_on(writers)
            finally:
                self._abandoned.set()
        if failures:
            raise failures[0]

    def _has_room(self, copy: ObjectCopy) -> bool:
        on_the_way = [job[0].nbytes for job in (*self._reading, *self._writing)]
        fits = sum(on_the_way) + copy.nbytes <= AHEAD_NBYTES and len(on_the_way) < AHEAD
        return fits or not on_the_way

    def _go_on(self, writers: Pool) -> Iterator[CopyOutcome]:
        """Yield what was written; else wait for the oldest object, and begin to write it."""
        if self._writing and (not self._reading or self._writing[0][1].done()):
            yield self._writing[0][1].result()
            self._writing.popleft()
            return
        copy, reading = self._reading[0]
        found = reading.result()
        if copy.is_document:
            for _, writing in self._writing:
                yield writing.result()
            self._writing.clear()
            self._reading.popleft()
            yield self._put(copy, found)
        else:
            self._reading.popleft()
            self._writing.append((copy, writers.submit(self._put, copy, found)))

    def _read(self, copy: ObjectCopy) -> Buffer | CopyOutcome:
        """Read and prove an object; return the outcome if there is nothing to write."""
        if self._abandoned.is_set():
            raise errors.StoreUnavailableError("the copy was abandoned", key=copy.key)
        if copy.content is not None:
            return copy.content
        if self._may_be_there(copy):
            try:
                _proven(self._destination, replace(copy, pin=""))
            except (errors.ObjectNotFoundError, errors.FormatError):
                pass
            else:
                return CopyOutcome(copy, 0)
        try:
            return once_more(lambda: _proven(self._source, copy))
        except errors.ObjectNotFoundError:
            return CopyOutcome(copy, 0, is_lost=True)

    def _put(self, copy: ObjectCopy, found: Buffer | CopyOutcome) -> CopyOutcome:
        if isinstance(found, CopyOutcome):
            return found
        done, there = CopyOutcome(copy, copy.nbytes), self._destination
        if not copy.is_document:
            there.put(copy.key, found)
            return done
        try:
            there.put_if_absent(copy.key, bytes(found))
        except errors.AlreadyExistsError:
            kept = there.get(copy.key)
            if not kept:  # left by a writer that was killed
                there.put(copy.key, found)
                return done
            is_other = kept != found
            if is_other and not copy.key.startswith(EDGE_PREFIX):
                raise errors.ForkedChainError(
                    f"{there.url} has another {copy.key} than {self._source.url}",
                    version=copy.version,
                    hint="if a publisher continued here, this is not a mirror any more; if the "
                    "source was restored from a backup, remove this record and later ones of its "
                    "kind from the mirror; if the object is damaged, delete it and mirror again",
                ) from None
            return CopyOutcome(copy, 0, is_other=is_other)
        return done


def _until_failure(
    copies: Iterable[ObjectCopy], failures: list[errors.DeltaChainError]
) -> Iterator[ObjectCopy]:
    """Yield copies up to an error, which is noted: what was proven before it is still copied."""
    try:
        yield from copies
    except errors.DeltaChainError as exc:
        failures.append(exc)


def _proven(store: Store, copy: ObjectCopy) -> Buffer:
    data = store.read(copy.key, nbytes=copy.nbytes, pin=copy.pin)
    check_digest(data, copy.digest, copy.key)
    return data
