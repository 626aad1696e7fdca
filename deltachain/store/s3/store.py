"""Objects in an S3 bucket of AWS or any S3-compatible server, through boto3."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from typing_extensions import override

from deltachain.errors import ConfigError
from deltachain.retry import Deadline
from deltachain.store.base import (
    MAX_DOCUMENT,
    MAX_KEY_LENGTH,
    Capabilities,
    ObjectInfo,
    Store,
    bytes_view,
    check_key,
    check_limit,
    check_nbytes,
    check_prefix,
    check_range,
    guarded,
    is_segment,
    too_short,
)
from deltachain.store.ranges import (
    RANGE_NBYTES,
    Open,
    Opened,
    ReplacedError,
    read_ranges,
    read_rest,
)
from deltachain.store.s3.bucket import Bucket
from deltachain.threads import Pool
from deltachain.types import Buffer

_THREADS: Final = 16
"""Concurrent requests of one store, in addition to those of its callers' threads."""

_MAX_PREFIX: Final = 1024 - 1 - MAX_KEY_LENGTH
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_PREFIX: Final = re.compile(r"[A-Za-z0-9._=+,@~-]+(/[A-Za-z0-9._=+,@~-]+)*")

_T = TypeVar("_T")


@guarded
class S3Store(Store):
    """Objects below a prefix of a bucket.

    The server lets exactly one concurrent ``put_if_absent`` win (``If-None-Match: *``). A server
    other than AWS is tested once, right after the first success: servers that ignore the condition,
    as some do, are refused. Every object is visible to all readers once its ``put`` has returned.

    Requests are retried after transient failures until no byte has moved for ``deadline_s``, and
    then end, however slowly the server continues. A request of a large upload may take that long
    once more. Redirects are not followed, except to the region named by AWS. A write counts as done
    if the ETag of its response is the MD5 of the bytes, or of a kind known to come from the server;
    otherwise the object is read back.

    A failed large upload is aborted. If the server does not answer the abort either, or its
    response to the start of the upload was lost, the uploaded parts stay, invisible, until a
    lifecycle rule of the bucket removes them.

    Args:
        bucket: Name of the bucket, which must exist.
        prefix: Prefix of every key, without leading or trailing slash; may be empty.
        options: Options of ``open_s3``.

    Raises:
        ConfigError: The options, the environment or the profile are invalid.
    """

    capabilities: Final = Capabilities(conditional_put=True, list_consistent=True)

    def __init__(
        self, bucket: str, prefix: str = "", options: Mapping[str, Any] | None = None
    ) -> None:
        self._bucket = Bucket(bucket, f"{prefix}/" if prefix else "", options or {})

    @property
    @override
    def url(self) -> str:
        """URL of the store: ``s3://``, the bucket and the prefix."""
        return self._bucket.url

    @property
    @override
    def requests(self) -> int:
        """Number of HTTP requests so far, retries included."""
        return self._bucket.requests

    @property
    @override
    def unanswered_since(self) -> float | None:
        return self._bucket.unanswered_since

    @override
    def get(self, key: str, *, limit: int = MAX_DOCUMENT) -> bytes:
        return self._get(key, limit, self._bucket.deadline(check_key(key)))

    @override
    def read(self, key: str, *, nbytes: int, pin: str = "") -> Buffer:
        """Read a whole object of known size, in concurrent ranges; see ``Store``."""
        check_range(0, nbytes)
        deadline = self._bucket.deadline(check_key(key), nbytes)
        if nbytes == 0:
            actual = self._bucket.head(key, deadline).nbytes
            check_nbytes(key, self.url, expected=0, actual=actual)
            return b""

        def attempt() -> Buffer:
            # The first range gives the size, before memory is allocated for the object.
            opened = self._bucket.open_range(key, 0, min(nbytes, RANGE_NBYTES), deadline)
            with closing(opened.body), Pool(_THREADS, "deltachain-s3") as pool:
                check_nbytes(key, self.url, expected=nbytes, actual=opened.nbytes)
                return read_ranges(opened, nbytes, self._reopen(key, deadline), deadline, pool)

        return _of_one_content(attempt, deadline)

    @override
    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        deadline = self._bucket.deadline(check_key(key), length)
        stop = start + length
        if length == 0:
            nbytes = self._bucket.head(key, deadline).nbytes
            if stop > nbytes:
                raise too_short(key, self.url, nbytes=nbytes, end=stop)
            return b""

        def attempt() -> bytes:
            opened = self._bucket.open_range(key, start, stop, deadline)
            with closing(opened.body):
                if stop > opened.nbytes:  # before memory is allocated
                    raise too_short(key, self.url, nbytes=opened.nbytes, end=stop)
                return self._rest(key, opened, start, stop, deadline)

        return _of_one_content(attempt, deadline)

    @override
    def put(self, key: str, data: Buffer) -> str:
        view = bytes_view(data)
        deadline = self._bucket.deadline(check_key(key), view.nbytes)
        self._bucket.put(key, view, deadline, lambda: self._holds(key, view, deadline))
        return ""

    @override
    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Write an object if the key has none; see ``Store``.

        An existing object counts as written by this call if it has the same bytes and an earlier
        attempt of this call got no response.

        Raises:
            ConfigError: The server ignores the condition.
        """
        view = bytes_view(data)
        deadline = self._bucket.deadline(check_key(key), view.nbytes)
        self._bucket.put_if_absent(key, view, deadline, lambda: self._holds(key, view, deadline))

    @override
    def find(self, key: str) -> ObjectInfo | None:
        """Look up an object without reading it; see ``Store``.

        Raises:
            ConfigError: The bucket does not exist.
        """
        return self._bucket.find(key, self._bucket.deadline(check_key(key)))

    @override
    def find_all(self, keys: Iterable[str]) -> Mapping[str, ObjectInfo]:
        """Look up several objects concurrently; see ``Store``."""
        wanted = [check_key(key) for key in dict.fromkeys(keys)]
        with Pool(_THREADS, "deltachain-s3") as pool:
            found = [info for info in pool.map(self.find, wanted) if info is not None]
        return {info.key: info for info in found}

    @override
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Iterate over objects whose key begins with ``prefix``, in order; see ``Store``.

        Names in the bucket that are not valid keys are omitted.
        """
        return self._list(check_prefix(prefix))

    @override
    def delete(self, key: str) -> None:
        self._bucket.delete(key, self._bucket.deadline(check_key(key)))

    @override
    def clock(self) -> float | None:
        return self._bucket.now()

    @override
    def close(self) -> None:
        """Close connections."""
        self._bucket.close()

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        # Sorted here: some servers do not sort, nor does AWS in directory buckets.
        found = (info for info in self._bucket.list(prefix) if _is_key(info.key))
        yield from sorted(found, key=lambda info: info.key)

    def _get(self, key: str, limit: int, deadline: Deadline) -> bytes:
        def attempt() -> bytes:
            opened = self._bucket.open(key, deadline, nbytes=limit)
            with closing(opened.body):
                check_limit(key, self.url, nbytes=opened.nbytes, limit=limit)
                return self._rest(key, opened, 0, opened.nbytes, deadline)

        return _of_one_content(attempt, deadline)

    def _holds(self, key: str, view: memoryview, deadline: Deadline) -> bool:
        """Return whether the object exists with these bytes."""
        found = self._bucket.find(key, deadline)
        if found is None or found.nbytes != view.nbytes:
            return False
        return self._get(key, view.nbytes, deadline) == view

    def _rest(self, key: str, opened: Opened, start: int, stop: int, deadline: Deadline) -> bytes:
        """Read all bytes of a response that begins at ``start``."""
        data = bytearray(stop - start)
        read_rest(opened, start, memoryview(data), self._reopen(key, deadline), deadline)
        return bytes(data)

    def _reopen(self, key: str, deadline: Deadline) -> Open:
        return lambda start, stop, pin: self._bucket.open_range(key, start, stop, deadline, pin)


def open_s3(
    url: str,
    options: Mapping[str, Any] | None = None,
    *,
    writer: bool = False,  # noqa: ARG001 - as every opener
) -> S3Store:
    """Open ``s3://bucket`` or ``s3://bucket/prefix``.

    Credentials, region and endpoint come from the options, else from the usual sources of AWS
    tools: ``AWS_*`` with ``AWS_ENDPOINT_URL`` and ``AWS_ENDPOINT_URL_S3``, profiles, and the
    machine's own credentials; files are read again once they change. With an endpoint of the user,
    boto3's additional checksums are off, unless enabled by ``AWS_REQUEST_CHECKSUM_CALCULATION`` or
    ``AWS_RESPONSE_CHECKSUM_VALIDATION``.

    Args:
        url: URL of the store.
        options: ``key``, ``secret``, ``token``, ``profile``, ``region``, ``endpoint_url``; ``anon``
            for unsigned requests; ``client_kwargs`` and ``config_kwargs`` for boto3's client and
            its ``Config``; ``deadline_s``, the seconds without progress after which a call fails.
        writer: Ignored.

    Raises:
        ConfigError: The URL has no bucket, or more than a bucket and a prefix, or the options, the
            environment or the profile are invalid.
    """
    parts = urlsplit(url)
    # The refused URL is not shown: it may contain credentials.
    if re.fullmatch(r"[A-Za-z0-9._-]+", parts.netloc) and not _BUCKET.fullmatch(parts.netloc):
        raise ConfigError(
            f"{parts.netloc!r} is no name of a bucket",
            hint="it has 3 to 63 letters, digits, dots and hyphens, and begins and ends with a "
            "letter or a digit: s3://bucket/prefix",
        )
    if not url.lower().startswith("s3://") or not _BUCKET.fullmatch(parts.netloc):
        raise ConfigError(
            "s3:// store URLs name a bucket, and no user, password or port",
            hint="s3://bucket/prefix, with the credentials in AWS_* or in the store options",
        )
    prefix = parts.path.strip("/")
    if parts.query or parts.fragment:
        raise ConfigError("s3:// store URLs have no query and no fragment")
    bad = not _PREFIX.fullmatch(prefix) or {".", ".."} & set(prefix.split("/"))
    if prefix and (bad or len(prefix) > _MAX_PREFIX):
        raise ConfigError(
            "the prefix of an s3:// store URL is made of names with one slash between them",
            hint=f"use A-Z a-z 0-9 . _ = + , @ ~ - and at most {_MAX_PREFIX} characters",
        )
    return S3Store(parts.netloc, prefix, options)


def _of_one_content(attempt: Callable[[], _T], deadline: Deadline) -> _T:
    """Read again from the start if another writer replaces the object meanwhile."""
    number = 0
    while True:
        try:
            return attempt()
        except ReplacedError as exc:
            if not deadline.pause(number):
                raise deadline.error("it is replaced faster than it is read") from exc
            number += 1


def _is_key(name: str) -> bool:
    return len(name) <= MAX_KEY_LENGTH and all(map(is_segment, name.split("/")))
