"""Copies of objects: read and proven beside one another, then put in order."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Event
from typing import Final

from deltachain import errors
from deltachain.chain.checks import check_digest, once_more
from deltachain.chain.fetch import Room, scratch
from deltachain.format.documents import Edge
from deltachain.format.keys import EDGE_PREFIX
from deltachain.store import Buffer, Store
from deltachain.threads import Pool
from deltachain.types import Version

THREADS: Final = 8  # objects read or written at a time: enough to fill a link between two regions
AHEAD: Final = 64  # objects of a batch at most
AHEAD_NBYTES: Final = 1 << 30  # bytes of a batch at most, but for a single object that is larger

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectCopy:
    """One object to copy."""

    key: str
    nbytes: int  # its length in bytes
    digest: str = ""  # blake3 that its content must have; empty for a document
    pin: str = ""
    # Its bytes, if it is a document, which was read and proven already.
    content: bytes | None = None
    # The version that names it; `None` for the identity of the chain.
    version: Version | None = None
    edge: Edge | None = None  # the edge that it is a part of; `None` for others

    @property
    def is_document(self) -> bool:
        return self.content is not None


@dataclass(frozen=True, slots=True)
class CopyOutcome:
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
        self._ended = Event()

    def run(self, copies: Iterable[ObjectCopy], stop: Event) -> Iterator[CopyOutcome]:
        """Copy objects; yield each once it is in the mirror."""
        with Pool(THREADS, "deltachain-copy") as pool:
            try:
                for batch in batches(copies):
                    yield from self._copy(batch, pool, stop)
                    if stop.is_set():
                        return
            finally:
                self._ended.set()

    def _copy(self, batch: Sequence[ObjectCopy], pool: Pool, stop: Event) -> Iterator[CopyOutcome]:
        proven = list[tuple[ObjectCopy, Buffer | CopyOutcome]]()
        failure: errors.DeltaChainError | None = None
        reads = pool.map(partial(self._read, Room(scratch(), 0)), batch)
        for copy in batch:
            if stop.is_set():
                break
            try:
                proven.append((copy, next(reads)))
            except errors.DeltaChainError as exc:
                failure = exc
                break
        payloads = [(copy, found) for copy, found in proven if not copy.is_document]
        puts = pool.map(self._put, *zip(*payloads, strict=True)) if payloads else iter(())
        for copy, found in proven:
            yield self._put(copy, found) if copy.is_document else next(puts)
        if failure is not None:
            raise failure

    def _read(self, room: Room, copy: ObjectCopy) -> Buffer | CopyOutcome:
        """Read and prove an object; return the outcome if there is nothing to write."""
        if self._ended.is_set():
            raise errors.StoreUnavailableError("the copy was abandoned", key=copy.key)
        if copy.content is not None:
            return copy.content
        if self._may_be_there(copy):
            try:
                _proven(self._destination, replace(copy, pin=""), room)
            except (errors.ObjectNotFoundError, errors.FormatError):
                pass
            else:
                return CopyOutcome(copy, 0)
        try:
            return once_more(lambda: _proven(self._source, copy, room))
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


def batches(copies: Iterable[ObjectCopy]) -> Iterator[list[ObjectCopy]]:
    """Group copies up to the limits; what comes before an error is still copied."""
    batch, nbytes = list[ObjectCopy](), 0
    try:
        for copy in copies:
            if batch and (len(batch) >= AHEAD or nbytes + copy.nbytes > AHEAD_NBYTES):
                yield batch
                batch, nbytes = [], 0
            batch.append(copy)
            nbytes += copy.nbytes
    except errors.DeltaChainError:
        yield batch
        raise
    yield batch


def _proven(store: Store, copy: ObjectCopy, room: Room) -> Buffer:
    data: Buffer = b""
    try:
        if not room.holds(copy.nbytes):
            data = room.map(room.fill(store, copy), copy.nbytes)
    except errors.DeltaChainError:  # some of its subclasses are OSErrors too
        raise
    except OSError as exc:
        logger.info("%s is held in memory: %s", copy.key, exc)
    data = data or store.read(copy.key, nbytes=copy.nbytes, pin=copy.pin)
    check_digest(data, copy.digest, copy.key)
    return data
