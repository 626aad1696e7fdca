"""Objects in an S3 bucket of AWS or any S3-compatible server, through boto3."""

import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from functools import cached_property
from threading import local
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import numpy as np
from boto3.s3.transfer import TransferConfig
from typing_extensions import override

from deltachain.errors import ConfigError, DeltaChainError, StoreUnavailableError
from deltachain.retry import Backoff, Deadline
from deltachain.store import base
from deltachain.store.calls import Calls, RetryError
from deltachain.store.s3 import errors as failures
from deltachain.store.s3.client import Client, make_client, options_of
from deltachain.threads import Pool
from deltachain.types import Buffer

PART_NBYTES: Final = 16 << 20  # of a part, and of the largest object put by one request
RANGE_NBYTES: Final = 8 << 20  # of a range: a few saturate a link, and a cut costs little
_THREADS: Final = 16  # concurrent requests, in addition to those of its callers' threads

_TRANSFER: Final = TransferConfig(
    multipart_threshold=PART_NBYTES, multipart_chunksize=PART_NBYTES, max_concurrency=8
)
_PART_ATTEMPTS: Final = 5  # attempts of each part of a large object, by boto3
_SMALL: Final = 1 << 20  # largest body that is sent in one socket call, in bytes

_CHUNK_NBYTES: Final = 64 << 10
_PAUSES: Final = Backoff(0.1, 5.0)

_MAX_PREFIX: Final = 1024 - 1 - base.MAX_KEY_LENGTH
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_PREFIX: Final = re.compile(r"[A-Za-z0-9._=+,@~-]+(/[A-Za-z0-9._=+,@~-]+)*")

_T = TypeVar("_T")


class _StatusError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@base.guarded
class S3Store(base.Store):
    """Objects below a prefix of a bucket.

    The server lets exactly one concurrent ``put_if_absent`` win (``If-None-Match: *``). A server
    other than AWS is tested once, right after the first success: servers that ignore the condition,
    as some do, are refused. Every object is visible to all readers once its ``put`` has returned.

    Requests are retried after transient failures until no byte has moved for ``deadline_s``, and
    then end, however slowly the server continues. Redirects are not followed, except to the region
    named by AWS. A write counts as done if its response has the ETag of the object.

    A failed large upload is aborted. If the server does not answer the abort either, or its
    response to the start of the upload was lost, the uploaded parts stay, invisible, until a
    lifecycle rule of the bucket removes them.
    """

    capabilities: Final = base.Capabilities(conditional_put=True, list_consistent=True)

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        options: Mapping[str, Any] | None = None,
        *,
        conditions_hold: bool = False,
    ) -> None:
        self._options = options or {}
        self._bucket, self._prefix = bucket, f"{prefix}/" if prefix else ""
        self._stall_s = options_of(self._options).deadline_s
        self._calls = Calls(self.url, _PAUSES)
        # A conditional write must know how often it was sent, so boto3 repeats only parts.
        self._client, is_own = make_client(self._options)
        self._watch(self._client)
        self._conditions_hold = conditions_hold or not is_own
        self._exists = False
        self._answer = local()

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    @property
    def requests(self) -> int:
        return self._calls.requests

    @property
    def unanswered_since(self) -> float | None:
        return self._calls.since

    def clock(self) -> float | None:
        return self._calls.now()

    def get(self, key: str, *, limit: int = base.MAX_DOCUMENT) -> bytes:
        return self._get(key, limit, self._deadline(base.check_key(key)))

    @override
    def read(self, key: str, *, nbytes: int, pin: str = "") -> Buffer:
        base.check_range(0, nbytes)
        deadline = self._deadline(base.check_key(key), nbytes)
        if nbytes == 0:
            base.check_nbytes(key, self.url, expected=0, actual=self._head(key, deadline).nbytes)
            return b""
        tries = 0
        while True:
            try:
                return self._read(key, nbytes, deadline)
            except _StatusError as exc:  # another writer replaced the object meanwhile
                if exc.status != 412 or not deadline.pause(_PAUSES.pause_s(tries)):
                    raise deadline.error("it is replaced faster than it is read") from exc
                tries += 1

    def get_range(self, key: str, start: int, length: int) -> bytes:
        base.check_range(start, length)
        deadline, stop = self._deadline(base.check_key(key), length), start + length
        if length == 0:
            total = self._head(key, deadline).nbytes
        else:
            _, data, total = self._range(key, (start, stop), deadline)
            if stop <= total:
                return bytes(data)
        if stop > total:
            raise base.too_short(key, self.url, nbytes=total, end=stop)
        return b""

    def put(self, key: str, data: Buffer) -> str:
        view = base.bytes_view(data)
        client = self._transfers if view.nbytes > PART_NBYTES else self._client
        deadline = self._deadline(base.check_key(key), view.nbytes)

        def put() -> None:
            failures.whole(client.put_object(**self._at(key), Body=_body(view)), "ETag")

        def upload() -> None:
            source, moved = _Source(view, deadline), lambda _: deadline.moved()
            try:
                client.upload_fileobj(source, **self._at(key), Config=_TRANSFER, Callback=moved)
            except Exception as exc:
                if failures.status_of(exc) != 404 or failures.code_of(exc) == "NoSuchBucket":
                    raise
                # Completed by an attempt whose answer was lost, or aborted by another client.
                raise failures.answered_by("an upload that was cleared away", "") from exc
            # The library does not look at the last answer, which something else may give.
            if client.head_object(**self._at(key)).get("ContentLength") != view.nbytes:
                raise failures.answered_by("a success that wrote nothing")

        self._send(upload if view.nbytes > PART_NBYTES else put, deadline, key)
        return ""

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Write an object if the key has none; see ``Store``.

        One with the same bytes is this call's own if an earlier attempt got no response.
        """
        view = base.bytes_view(data)
        deadline = self._deadline(base.check_key(key), view.nbytes)
        unsure: set[object] = set()

        def create() -> None:
            attempt = object()
            unsure.add(attempt)  # until an answer tells
            try:
                self._put_absent(key, view)
            except Exception as exc:
                if failures.wrote_nothing(exc):
                    unsure.discard(attempt)
                raise

        try:
            self._send(create, deadline, key, 412)
        except _StatusError as exc:
            self._conditions_hold = True
            if not unsure or not self._holds(key, view, deadline):
                raise base.already_exists(key, self.url) from exc
        else:
            if not self._conditions_hold:
                self._try_condition(key, view, deadline)

    def find(self, key: str) -> base.ObjectInfo | None:
        return self._find(key, self._deadline(base.check_key(key)))

    def find_all(self, keys: Iterable[str]) -> Mapping[str, base.ObjectInfo]:
        wanted = [base.check_key(key) for key in dict.fromkeys(keys)]
        with Pool(_THREADS, "deltachain-s3") as pool:
            found = [info for info in pool.map(self.find, wanted) if info is not None]
        return {info.key: info for info in found}

    def list(self, prefix: str = "") -> Iterator[base.ObjectInfo]:
        return self._list(base.check_prefix(prefix))

    def delete(self, key: str) -> None:
        deadline = self._deadline(base.check_key(key))
        self._send(lambda: self._client.delete_object(**self._at(key)), deadline, key)

    def close(self) -> None:
        self._client.close()
        if "_transfers" in vars(self):
            self._transfers.close()

    @cached_property
    def _transfers(self) -> Client:
        made, _ = make_client(self._options, attempts=_PART_ATTEMPTS)
        self._watch(made)
        return made

    def _watch(self, client: Client) -> None:
        """Count the requests of a client, and look at its answers before boto3 does."""

        def see(*, response_dict: dict[str, Any], **_: object) -> None:
            self._calls.hear(response_dict["headers"].get("date"))
            self._answer.body = response_dict.get("body")
            failures.refuse_redirect(response_dict)

        client.meta.events.register("before-send.s3", lambda **_: self._calls.count())
        client.meta.events.register("before-parse.s3", see)

    def _deadline(self, key: str, nbytes: int = 0) -> Deadline:
        return Deadline(key, self.url, self._stall_s, nbytes)

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": f"{self._prefix}{key}"}

    def _send(self, call: Callable[[], _T], deadline: Deadline, key: str, *answers: int) -> _T:
        def attempt() -> _T:
            try:
                return call()
            except (DeltaChainError, RetryError):
                raise
            except Exception as exc:  # an answer may cause any error in its parser
                body: Any = getattr(self._answer, "body", None)
                if hasattr(body, "close"):
                    body.close()  # nothing else owns it if the parser failed
                if failures.status_of(exc) in answers and failures.code_of(exc) != "NoSuchBucket":
                    raise _StatusError(failures.status_of(exc)) from exc
                raise failures.typed(exc, key, self.url) from exc

        found = self._calls.repeat(attempt, deadline, key)
        self._exists = True
        return found

    def _get(self, key: str, limit: int, deadline: Deadline) -> bytes:
        def get() -> bytes:
            reply = self._client.get_object(**self._at(key))
            with closing(reply["Body"]) as body:
                failures.whole(reply, "ContentLength", "LastModified")
                base.check_limit(key, self.url, nbytes=reply["ContentLength"], limit=limit)
                data: bytes = body.read()
            if reply["ResponseMetadata"]["HTTPStatusCode"] != 200:
                raise failures.answered_by("a part of an object, where all of it was asked for")
            return data

        try:
            return self._send(get, deadline, key, 404)
        except _StatusError as exc:
            raise base.not_found(key, self.url) from exc

    def _read(self, key: str, nbytes: int, deadline: Deadline) -> memoryview:
        """Read an object in concurrent ranges; raise ``_StatusError`` (412) if it changes."""
        first = min(nbytes, RANGE_NBYTES)
        etag, head, total = self._range(key, (0, first), deadline, most=nbytes)
        base.check_nbytes(key, self.url, expected=nbytes, actual=total)
        if first == nbytes:
            return head
        # Not a bytearray, which is zeroed first. Either every byte is written below, or we raise.
        buffer = np.empty(nbytes, np.uint8).data
        buffer[:first] = head

        def fetch(start: int) -> None:
            if deadline.left_s <= 0:
                raise deadline.error("the store is too slow")
            span = start, min(start + RANGE_NBYTES, nbytes)
            found, _, size = self._range(key, span, deadline, etag=etag, into=buffer[slice(*span)])
            if (found, size) != (etag, nbytes):  # the server ignores If-Match
                raise _StatusError(412)

        with Pool(_THREADS, "deltachain-s3") as pool:
            for _ in pool.map(fetch, range(first, nbytes, RANGE_NBYTES)):
                pass
        return buffer

    def _range(
        self,
        key: str,
        span: tuple[int, int],
        deadline: Deadline,
        *,
        etag: str = "",
        into: memoryview | None = None,
        most: int = 0,
    ) -> tuple[str, memoryview, int]:
        """Read a range, cut at the object's end; return its ETag, the bytes, and its size.

        Nothing is read of an object of another size than ``most``; raises ``_StatusError`` (412)
        for another content than ``etag``.
        """
        pinned = {"IfMatch": etag} if etag else {}

        def get() -> tuple[str, memoryview, int]:
            reply = self._client.get_object(
                **self._at(key), **pinned, Range=f"bytes={span[0]}-{span[1] - 1}"
            )
            with closing(reply["Body"]) as body:
                total = _total(failures.whole(reply, "ContentLength", "LastModified"), span)
                stop = min(span[1], total)
                view = memoryview(bytearray(stop - span[0])) if into is None else into
                if most in (0, total):
                    _fill(view, body, deadline)
            return reply.get("ETag", ""), view, total

        try:
            return self._send(get, deadline, key, 404, 412, 416)
        except _StatusError as exc:
            if exc.status == 404:
                raise base.not_found(key, self.url) from exc
            if exc.status == 412 or etag:
                raise _StatusError(412) from exc
        total = self._head(key, deadline).nbytes
        raise base.too_short(key, self.url, nbytes=total, end=span[1])

    def _find(self, key: str, deadline: Deadline) -> base.ObjectInfo | None:
        def head() -> Any:  # noqa: ANN401
            reply = self._client.head_object(**self._at(key))
            return failures.whole(reply, "ContentLength", "LastModified")

        try:
            reply = self._send(head, deadline, key, 404)
        except _StatusError:
            self._check_exists(deadline)
            return None
        modified = reply["LastModified"].timestamp()
        return base.ObjectInfo(key=key, nbytes=reply["ContentLength"], modified=modified)

    def _head(self, key: str, deadline: Deadline) -> base.ObjectInfo:
        found = self._find(key, deadline)
        if found is None:
            raise base.not_found(key, self.url)
        return found

    def _check_exists(self, deadline: Deadline) -> None:
        """Raise if the bucket is absent: HEAD answers the same for an absent object and bucket."""
        if self._exists:
            return
        try:
            # 403 also means that the bucket exists, without permission to look it up.
            self._send(
                lambda: self._client.head_bucket(Bucket=self._bucket), deadline, "", 403, 404
            )
        except _StatusError as exc:
            if exc.status == 404:
                raise failures.no_bucket(self.url) from exc
        self._exists = True

    def _put_absent(self, key: str, view: memoryview) -> None:
        body = _body(view)
        failures.whole(self._client.put_object(**self._at(key), Body=body, IfNoneMatch="*"), "ETag")

    def _try_condition(self, key: str, view: memoryview, deadline: Deadline) -> None:
        """Repeat a conditional write that succeeded; refuse a server that accepts it again."""
        try:
            self._send(lambda: self._put_absent(key, view), deadline, key, 412)
        except _StatusError:
            self._conditions_hold = True
            return
        except StoreUnavailableError:
            return  # the next object tells
        raise ConfigError(
            f"the server of {self.url} ignores If-None-Match, so that two publishers can both win",
            hint="keep the chain on a server that has conditional writes",
        )

    def _holds(self, key: str, view: memoryview, deadline: Deadline) -> bool:
        found = self._find(key, deadline)
        if found is None or found.nbytes != view.nbytes:
            return False
        return self._get(key, view.nbytes, deadline) == view

    def _list(self, prefix: str) -> Iterator[base.ObjectInfo]:
        page = {"Bucket": self._bucket, "Prefix": f"{self._prefix}{prefix}"}
        found: dict[str, base.ObjectInfo] = {}
        while True:
            reply = self._send(
                lambda: self._client.list_objects_v2(**page), self._deadline(prefix), prefix
            )
            for entry in reply.get("Contents", []):
                key = entry["Key"].removeprefix(self._prefix)
                if len(key) <= base.MAX_KEY_LENGTH and all(map(base.is_segment, key.split("/"))):
                    modified = entry["LastModified"].timestamp()
                    found[key] = base.ObjectInfo(key=key, nbytes=entry["Size"], modified=modified)
            if not reply.get("IsTruncated"):
                break
            page["ContinuationToken"] = reply["NextContinuationToken"]
        # Sorted here: some servers do not sort, nor does AWS in directory buckets.
        yield from (found[key] for key in sorted(found))


class _Source(io.RawIOBase):
    """A memory view as a file, which ends with the call that it was given to."""

    def __init__(self, view: memoryview, deadline: Deadline) -> None:
        super().__init__()
        self._view, self._deadline, self._at = view, deadline, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._view)}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any, /) -> int:  # noqa: ANN401 - any writable buffer
        """Copy the next bytes; raise ``TimeoutError`` after the deadline."""
        if self._deadline.left_s <= 0:
            raise TimeoutError("the store is too slow")
        data = self._view[self._at : self._at + len(buffer)]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _body(view: memoryview) -> bytes | io.BytesIO:
    """Return the body of a write.

    Bytes are sent in one socket call, whose timeout a large body would reach on a slow network. A
    file is sent in pieces, once the server asks for it, which takes a round trip.
    """
    return bytes(view) if view.nbytes <= _SMALL else io.BytesIO(view)


def _fill(view: memoryview, body: Any, deadline: Deadline) -> None:  # noqa: ANN401 - untyped
    at = 0
    while at < len(view):
        nbytes = body.readinto(view[at : at + _CHUNK_NBYTES])
        if not nbytes:
            raise failures.answered_by("a body that ends early")
        deadline.moved()
        at += nbytes


def _total(reply: dict[str, Any], span: tuple[int, int]) -> int:
    start, stop = span
    nbytes = int(reply["ContentLength"])
    if reply["ResponseMetadata"]["HTTPStatusCode"] != 206:
        if start:
            raise failures.answered_by(
                "a whole object, where a part of it was asked for",
                "keep the chain on a server, and behind proxies, that heed Range",
            )
        return nbytes  # the range is at the start of the object
    said = str(reply.get("ContentRange", ""))
    total = int(said.rpartition("/")[2]) if said.rpartition("/")[2].isdigit() else 0
    last = min(stop, total) - 1
    if said != f"bytes {start}-{last}/{total}" or nbytes != last + 1 - start:
        raise failures.answered_by(
            f"{nbytes} bytes of the range {said[:60]!r}, where bytes {start} to {stop - 1} were "
            "asked for",
            "a proxy or a cache on the way mixes ranges up: let it leave these answers alone",
        )
    return total


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
