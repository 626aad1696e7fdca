"""Encoding and upload of the parts of an edge."""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from threading import BoundedSemaphore, Lock
from typing import Final, Self

from deltachain.codec import Change, EncodedPart, encode_part
from deltachain.codec.encode import NO_METADATA
from deltachain.format.documents import Edge, ObjectRef
from deltachain.format.keys import PayloadKind, digest_of_pieces, payload_key
from deltachain.store import Store
from deltachain.threads import Pool
from deltachain.types import Version


class UploadClock:
    """Measures the time in which at least one upload is under way.

    Thread-safe. Uploads that run at the same time share the link, so their times do not add up.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._running = 0
        self._since = 0.0
        self._seconds = 0.0

    @contextmanager
    def upload(self) -> Iterator[None]:
        with self._lock:
            if not self._running:
                self._since = time.perf_counter()
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    self._seconds += time.perf_counter() - self._since

    @property
    def seconds(self) -> float:
        with self._lock:
            return self._seconds


DENSE_SHARE: Final = 0.67
"""Compression ratio of dense bf16 weights by byte planes and zstd, N(0, 0.02)."""

PARTS_ON_THE_WAY: Final = 3
"""Parts in memory beside the one that is gathered: one being encoded, others being uploaded."""

UPLOADS: Final = 2  # parts uploaded at a time: the second hides the round trips of the first
ANCHOR_PARTS: Final = 16  # parts of an anchor, about: enough that encoding and upload overlap
SMALL_PART_NBYTES: Final = 64 << 20
"""Size of an anchor's part, in bytes, below which more parts cost more requests than time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeKeys:
    """Unique names of the parts of one rank in one attempt."""

    kind: PayloadKind
    version: Version
    epoch: int
    commit_id: str


class EdgeUpload:
    """Encoder and uploader of an edge's changes, in parts of bounded size.

    One part is encoded, by all cores, while others are uploaded; ``add`` waits when
    ``PARTS_ON_THE_WAY`` are, so that memory does not grow with the model. A single part is
    encoded and uploaded by the caller. Parts are invisible to followers until a manifest or an
    edge record names them. Use as a context manager: leaving it early abandons parts that are not
    being uploaded yet.
    """

    def __init__(
        self,
        store: Store,
        keys: EdgeKeys,
        *,
        raw: bool,
        part_nbytes: int,
        visible: bool = True,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> None:
        self._write, self._keys = store.put if visible else store.upload, keys
        self._raw, self._part_nbytes, self._metadata = raw, part_nbytes, metadata
        self._group: dict[str, Change] = {}
        self._nbytes = 0
        self._parts: list[Future[Future[ObjectRef]]] = []
        self._encodings: set[str] = set()
        self._encoder = Pool(1, "deltachain-encode")
        self._uploader = Pool(UPLOADS, "deltachain-upload")
        self._room = BoundedSemaphore(PARTS_ON_THE_WAY)
        self._failure: BaseException | None = None
        self.clock = UploadClock()

    def add(self, change: Change) -> None:
        """Add a change; first pass the current part on if it is full or has the same tensor."""
        name, nbytes = change.delta.spec.name, change.delta.nbytes
        if self._group and (self._nbytes + nbytes > self._part_nbytes or name in self._group):
            self._pass_on()
        self._group[name] = change
        self._nbytes += nbytes

    def finish(self) -> Edge:
        """Upload the last part, wait for all parts, and return the edge."""
        with self:
            if self._group and self._parts:
                self._pass_on()
            parts = [part.result().result() for part in self._parts]
            if self._group:
                group = self._take()
                part = self._encode(group)
                parts.append(self._put(self._key(0), part, part.digest))
        kind, version = self._keys.kind, self._keys.version
        return Edge(
            kind=kind,
            base=version - 1 if kind == "delta" else None,
            encodings=tuple(sorted(self._encodings)),
            parts=tuple(parts),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._failure = self._failure or error
        self._encoder.shutdown()
        self._uploader.shutdown()

    def _key(self, number: int) -> str:
        keys = self._keys
        return payload_key(keys.kind, keys.version, keys.epoch, keys.commit_id, number)

    def _take(self) -> Sequence[Change]:
        group = [self._group[name] for name in sorted(self._group)]
        self._group, self._nbytes = {}, 0
        return group

    def _pass_on(self) -> None:
        self._room.acquire()
        if self._failure is not None:
            self._room.release()
            raise self._failure
        key = self._key(len(self._parts))
        self._parts.append(self._encoder.submit(self._encode_and_submit, key, self._take()))

    def _encode_and_submit(self, key: str, group: Sequence[Change]) -> Future[ObjectRef]:
        try:
            return self._uploader.submit(self._put_and_release, key, self._encode(group))
        except BaseException as error:
            self._failure = self._failure or error
            self._room.release()
            raise

    def _put_and_release(self, key: str, part: EncodedPart) -> ObjectRef:
        try:
            # By one thread: the others encode, and none of a group waits for them.
            return self._put(key, part, digest_of_pieces([part.content]))
        except BaseException as error:
            self._failure = self._failure or error
            raise
        finally:
            self._room.release()

    def _encode(self, group: Sequence[Change]) -> EncodedPart:
        if self._failure is not None:
            raise self._failure
        raw = self._raw and not any(change.windows for change in group)
        part = encode_part(group, raw=raw, metadata=self._metadata)
        self._encodings.update(part.encodings)
        return part

    def _put(self, key: str, part: EncodedPart, digest: str) -> ObjectRef:
        if self._failure is not None:
            raise self._failure
        with self.clock.upload():
            pin = self._write(key, part.content)
        return ObjectRef(
            key=key,
            nbytes=len(part.content),
            blake3=digest,
            directory=part.directory,
            pin=pin,
        )


def anchor_part_nbytes(nbytes: int, limit: int) -> int:
    """Return the size of an anchor's parts before compression, at most ``limit``, in bytes."""
    return min(limit, max(SMALL_PART_NBYTES, nbytes // ANCHOR_PARTS))
