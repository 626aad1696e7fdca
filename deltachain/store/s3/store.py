"""Objects in an S3 bucket: of AWS, or of any server that speaks S3, through boto3."""

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
    is_segment,
    too_short,
)
from deltachain.store.guard import guarded
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
"""Requests of one store that are under way at a time, beside those of its callers' threads."""

_MAX_PREFIX: Final = 1024 - 1 - MAX_KEY_LENGTH
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_PREFIX: Final = re.compile(r"[A-Za-z0-9._=+,@~-]+(/[A-Za-z0-9._=+,@~-]+)*")

_T = TypeVar("_T")


@guarded
class S3Store(Store):
    """Objects below a prefix of a bucket, shared by all who may reach it.

    Of racing ``put_if_absent`` the server lets one win (``If-None-Match: *``). A server that is not
    AWS is tried, once, right after the first one that succeeds: one that ignores the condition, as
    some do, is refused. Every object is seen by all as soon as its ``put`` returned.

    Every request is repeated while it fails for reasons that pass, until nothing moved for
    ``deadline_s``; it ends then, however slowly the server goes on. A request of a large upload may
    take as long once more. Redirects are not followed, but to the region that AWS names. A write is
    believed if its answer has an ETag that is the MD5 of the bytes, or any other that was seen to
    be the server's; else the object is read back.

    A large upload that was given up is aborted. Where the server is gone for that too, or its
    answer to the opening was lost, what there is of it stays, invisible, until a lifecycle rule of
    the bucket removes it.

    Args:
        bucket: The bucket, which must exist.
        prefix: Of every key, without a slash at its ends; may be empty.
        options: See ``open_s3``.

    Raises:
        ConfigError: The options, the environment or the profile do not make a client.
    """

    capabilities: Final = Capabilities(conditional_put=True, list_consistent=True)

    def __init__(
        self, bucket: str, prefix: str = "", options: Mapping[str, Any] | None = None
    ) -> None:
        self._bucket = Bucket(bucket, f"{prefix}/" if prefix else "", options or {})

    @property
    @override
    def url(self) -> str:
        """``s3://``, the bucket and the prefix."""
        return self._bucket.url

    @property
    @override
    def requests(self) -> int:
        """Every HTTP request that was sent, those that were repeated too."""
        return self._bucket.requests

    @override
    def get(self, key: str, *, limit: int = MAX_DOCUMENT) -> bytes:
        return self._get(key, limit, self._bucket.deadline(check_key(key)))

    @override
    def read(self, key: str, *, nbytes: int, pin: str = "") -> Buffer:
        """Read a whole object of known size, in ranges side by side; see ``Store``."""
        check_range(0, nbytes)
        deadline = self._bucket.deadline(check_key(key), nbytes)
        if nbytes == 0:
            actual = self._bucket.head(key, deadline).nbytes
            check_nbytes(key, self.url, expected=0, actual=actual)
            return b""

        def attempt() -> Buffer:
            # Its size comes with the first range: before memory is taken for it.
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
                if stop > opened.nbytes:  # before memory is taken for it
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
        """Write an object under a key that has none; see ``Store``.

        An object that is there counts as written by this call if it has the same bytes and an
        earlier attempt of this call went unanswered.

        Raises:
            ConfigError: The server ignores the condition.
        """
        view = bytes_view(data)
        deadline = self._bucket.deadline(check_key(key), view.nbytes)
        self._bucket.put_if_absent(key, view, deadline, lambda: self._holds(key, view, deadline))

    @override
    def find(self, key: str) -> ObjectInfo | None:
        """Look an object up without reading it; see ``Store``.

        Raises:
            ConfigError: The bucket does not exist, so that nothing can be said of its objects.
        """
        return self._bucket.find(key, self._bucket.deadline(check_key(key)))

    @override
    def find_all(self, keys: Iterable[str]) -> Mapping[str, ObjectInfo]:
        """Look several objects up, several at a time; see ``Store``."""
        wanted = [check_key(key) for key in dict.fromkeys(keys)]
        with Pool(_THREADS, "deltachain-s3") as pool:
            found = [info for info in pool.map(self.find, wanted) if info is not None]
        return {info.key: info for info in found}

    @override
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object whose key begins with ``prefix``, in order; see ``Store``.

        Names in the bucket that no key could have are left out.
        """
        return self._list(check_prefix(prefix))

    @override
    def delete(self, key: str) -> None:
        self._bucket.delete(key, self._bucket.deadline(check_key(key)))

    @override
    def close(self) -> None:
        """Give connections back."""
        self._bucket.close()

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        # Sorted here: not every server does, nor AWS in its directory buckets.
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
        """Whether an object is there with these bytes."""
        found = self._bucket.find(key, deadline)
        if found is None or found.nbytes != view.nbytes:
            return False
        return self._get(key, view.nbytes, deadline) == view

    def _rest(self, key: str, opened: Opened, start: int, stop: int, deadline: Deadline) -> bytes:
        """All bytes of an answer, which begins at ``start``."""
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

    Credentials, region and endpoint come from the options, else from where every AWS tool looks:
    ``AWS_*`` with ``AWS_ENDPOINT_URL`` and ``AWS_ENDPOINT_URL_S3``, profiles, and what the machine
    provides. With an endpoint of the user's own, boto3's additional checksums are off, unless
    ``AWS_REQUEST_CHECKSUM_CALCULATION`` or ``AWS_RESPONSE_CHECKSUM_VALIDATION`` ask for them.

    Args:
        url: Where.
        options: ``key``, ``secret``, ``token``, ``profile``, ``region``, ``endpoint_url``;
            ``anon``, to sign nothing; ``client_kwargs`` and ``config_kwargs``, for boto3's client
            and its ``Config``; ``deadline_s``, after which a call gives up that does not get on.
        writer: Makes no difference.

    Raises:
        ConfigError: The URL has no bucket or more than a prefix, or the options, the environment or
            the profile do not make a client.
    """
    parts = urlsplit(url)
    # What is refused is not shown: it may hold credentials.
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
    """Read again from the start while the object is replaced by others."""
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
