"""Requests to one bucket, with retries and typed errors."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Final, TypeAlias, TypeVar

from typing_extensions import override

from deltachain.errors import ConfigError, DeltaChainError
from deltachain.retry import DEADLINE_S, Deadline
from deltachain.store.base import ObjectInfo, already_exists, not_found, too_short
from deltachain.store.ranges import CutError, Opened, ReplacedError
from deltachain.store.s3.calls import (
    Calls,
    ETags,
    StatusError,
    is_conflict,
    is_transient,
    no_bucket,
    object_nbytes,
    once,
    status_of,
    typed,
    whole,
    wrote_nothing,
)
from deltachain.store.s3.client import Client, make_client
from deltachain.threads import Pool


class Download:
    """Body of a response, all of whose failures become a ``CutError``.

    Args:
        body: A ``StreamingBody`` of botocore.
    """

    def __init__(self, body: Any) -> None:  # noqa: ANN401 - untyped
        self._body = body

    def readinto(self, buffer: memoryview, /) -> int:
        """Read into ``buffer`` and return the number of bytes; 0 at the end.

        Raises:
            CutError: The remaining bytes cannot be read.
        """
        try:
            return int(self._body.readinto(buffer))
        except DeltaChainError:
            raise
        except Exception as exc:  # errors of a broken body have no documented class
            raise CutError from exc

    def close(self) -> None:
        """Discard the remaining bytes, and with them the connection, unless all were read."""
        self._body.close()


class Upload(io.RawIOBase):
    """A memory view as a file, copied piece by piece.

    A ``bytes`` object would be sent in one socket call, which times out on a slow network.

    Args:
        view: Flat bytes.
        deadline: Time limit of the request, enforced by ``read``.
    """

    def __init__(self, view: memoryview, deadline: Deadline) -> None:
        super().__init__()
        self._view = view
        self._deadline = deadline
        self._at = 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._at

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._view)}[whence]
        self._at = max(0, start + offset)
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        """Read up to ``size`` bytes; all remaining ones by default.

        Raises:
            StoreUnavailableError: The deadline passed.
        """
        self._deadline.moved()  # the bytes of earlier reads were sent
        stop = len(self._view) if size is None or size < 0 else self._at + size
        data = bytes(self._view[self._at : stop])
        self._at += len(data)
        return data


PART_NBYTES: Final = 16 << 20
"""Size of one part, and of the largest object put by one request, in bytes."""

_PARTS: Final = 10_000
"""Largest number of parts of one object."""

_THREADS: Final = 8
_ABORT_S: Final = 5.0
"""Time limit of aborting an upload, in seconds: the upload has failed, and its caller waits."""


class Uploader:
    """Uploader of large objects.

    Args:
        client: S3 client of boto3.
        calls: Sender of the client's requests.
    """

    def __init__(self, client: Client, calls: Calls) -> None:
        self._client = client
        self._calls = calls
        # boto3's default checksums of parts must be announced for the whole object, and repeated.
        checked = client.meta.config.request_checksum_calculation != "when_required"
        self._checksum = {"ChecksumAlgorithm": "CRC32"} if checked else {}

    def upload(
        self,
        at: dict[str, str],
        key: str,
        view: memoryview,
        deadline: Deadline,
        holds: Callable[[], bool],
    ) -> None:
        """Write an object, visible once its last part is stored; abort the upload on failure.

        Args:
            at: Bucket and name of the object.
            key: Key of the object, for errors.
            view: Bytes of the object.
            deadline: Deadline of the call.
            holds: Function that returns whether the object exists with these bytes.

        Raises:
            StoreError: The server refused, or failed for too long.
        """
        for again in (True, False):
            try:
                with self._opened(at, key, deadline) as upload:
                    parts = self._send_parts(upload, key, view, deadline)
                    self._complete(upload, key, parts, deadline, holds)
            except StatusError:
                # Completed by an attempt without a response, or aborted by another client: the two
                # cannot be distinguished, and writing the object again is right for both.
                if not again:
                    raise deadline.error("its upload is cleared away while it goes on") from None
            else:
                return

    @contextmanager
    def _opened(self, at: dict[str, str], key: str, deadline: Deadline) -> Iterator[dict[str, str]]:
        """Start an upload; abort it unless it is completed."""

        def create(_: Deadline) -> Any:  # noqa: ANN401
            return whole(self._client.create_multipart_upload(**at, **self._checksum), "UploadId")

        upload = {**at, "UploadId": self._send(create, deadline, key)["UploadId"]}
        try:
            yield upload
        except BaseException:
            self._abort(upload, key, deadline)
            raise

    def _send_parts(
        self, upload: dict[str, str], key: str, view: memoryview, deadline: Deadline
    ) -> list[dict[str, Any]]:
        nbytes = max(PART_NBYTES, -(-view.nbytes // _PARTS))

        def send(start: int) -> dict[str, Any]:
            number, part = 1 + start // nbytes, view[start : start + nbytes]

            def put(own: Deadline) -> Any:  # noqa: ANN401
                body = Upload(part, own)
                return whole(
                    self._client.upload_part(
                        **upload, **self._checksum, PartNumber=number, Body=body
                    ),
                    "ETag",
                )

            reply = self._send(put, deadline, key)
            told = {name: reply[name] for name in ("ETag", "ChecksumCRC32") if name in reply}
            return {"PartNumber": number, **told}

        with Pool(_THREADS, "deltachain-upload") as pool:
            sending: list[Future[dict[str, Any]]] = []
            try:
                for start in range(0, view.nbytes, nbytes):
                    sending.append(pool.submit(send, start))
                    if sending[-1].done():  # ran already if there is no thread
                        sending[-1].result()
                return [each.result() for each in sending]
            finally:
                for each in sending:  # parts not yet started when one failed
                    each.cancel()

    def _complete(
        self,
        upload: dict[str, str],
        key: str,
        parts: list[dict[str, Any]],
        deadline: Deadline,
        holds: Callable[[], bool],
    ) -> None:
        def complete(_: Deadline) -> None:
            reply = self._client.complete_multipart_upload(
                **upload, MultipartUpload={"Parts": parts}
            )
            if not reply.get("ETag") and not holds():
                raise wrote_nothing()

        self._send(complete, deadline, key)

    def _send(self, call: Callable[[Deadline], _T], deadline: Deadline, key: str) -> _T:
        """Send a request of an upload.

        The time limit of retries begins with the first failure: the server needs time for a part
        before it responds, and gets as much once more.

        Raises:
            StatusError: Status 404: the upload does not exist.
        """
        first = deadline.own()
        try:
            return once(lambda: call(first), first)
        except DeltaChainError:
            raise
        except Exception:  # noqa: BLE001 - typed below, if it stays
            again = deadline.own()
            return self._calls.repeat(lambda: call(again), again, key, 404)

    def _abort(self, upload: dict[str, str], key: str, deadline: Deadline) -> None:
        last = deadline.shorter(_ABORT_S)
        try:
            self._calls.repeat(
                lambda: self._client.abort_multipart_upload(**upload), last, key, 404
            )
        except (DeltaChainError, StatusError):
            return  # its parts stay, invisible, until a lifecycle rule removes them


_SMALL: Final = 1 << 20
"""Largest body that can be sent in one socket call on the slowest network, in bytes."""

_Body: TypeAlias = bytes | Upload
_T = TypeVar("_T")

Holds: TypeAlias = Callable[[], bool]
"""Function that returns whether the written key has an object with exactly these bytes."""


class Bucket:
    """Objects below a prefix of a bucket; thread-safe.

    Args:
        name: Name of the bucket.
        prefix: Prefix of every key; empty, or ends in a slash.
        options: Options of ``open_s3``.

    Raises:
        ConfigError: The options, the environment or the profile are invalid.
    """

    def __init__(self, name: str, prefix: str, options: Mapping[str, Any]) -> None:
        self._bucket = name
        self._prefix = prefix
        self._stall_s = _seconds(options.get("deadline_s", DEADLINE_S))
        self._client, own_endpoint = make_client(options, deadline_s=self._stall_s)
        self._calls = Calls(self._client, self.url)
        self._uploader = Uploader(self._client, self._calls)
        self._etags = ETags()
        self._conditions_hold = not own_endpoint
        self._exists = False

    @property
    def url(self) -> str:
        """URL of the store: ``s3://``, the bucket and the prefix."""
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    @property
    def requests(self) -> int:
        """Number of HTTP requests so far, retries included."""
        return self._calls.requests

    @property
    def unanswered_since(self) -> float | None:
        """Start of the first request since the last answer, by ``time.monotonic()``."""
        return self._calls.outage.since

    def now(self) -> float | None:
        """Return the time by the server's clock; ``None`` before its first answer."""
        return self._calls.clock.now()

    def deadline(self, key: str, nbytes: int = 0) -> Deadline:
        """Return the deadline of a call on an object, starting now."""
        return Deadline(key, self.url, self._stall_s, nbytes)

    def close(self) -> None:
        """Close connections."""
        self._client.close()

    def open(
        self,
        key: str,
        deadline: Deadline,
        *,
        pin: str = "",
        span: tuple[int, int] | None = None,
        nbytes: int = 0,
    ) -> Opened:
        """Open an object, or a range of it.

        Args:
            key: Key of the object.
            deadline: Deadline of the call.
            pin: Required content identifier, if known.
            span: First byte of the range, and the end, exclusive.
            nbytes: Bytes that the response may have in addition to the size of a document.

        Raises:
            ObjectNotFoundError: No object has this key.
            ReplacedError: The object does not have the content of ``pin``.
            StatusError: Status 416: the object has no byte of the range.
        """
        pinned = {"IfMatch": pin} if pin else {}
        ranged = {"Range": f"bytes={span[0]}-{span[1] - 1}"} if span else {}

        def get() -> Opened:
            reply = self._client.get_object(**self._at(key), **pinned, **ranged)
            total = object_nbytes(reply, span)
            return Opened(Download(reply["Body"]), total, reply.get("ETag", ""))

        try:
            return self._repeat(get, deadline, key, 404, 412, 416, nbytes=nbytes)
        except StatusError as exc:
            if exc.status == 404:
                raise not_found(key, self.url) from exc
            if exc.status == 412 or pin:  # a range of the pinned content exists
                raise ReplacedError from exc
            raise

    def open_range(
        self, key: str, start: int, stop: int, deadline: Deadline, pin: str = ""
    ) -> Opened:
        """Open bytes ``start`` to ``stop`` of an object.

        Raises:
            ObjectNotFoundError: No object has this key.
            MalformedError: The object has no byte ``start``.
            ReplacedError: The object does not have the content of ``pin``.
        """
        try:
            return self.open(key, deadline, pin=pin, span=(start, stop), nbytes=stop - start)
        except StatusError as exc:
            nbytes = self.head(key, deadline).nbytes
            raise too_short(key, self.url, nbytes=nbytes, end=stop) from exc

    def find(self, key: str, deadline: Deadline) -> ObjectInfo | None:
        """Look up an object.

        Raises:
            ConfigError: The bucket does not exist.
        """

        def head() -> Any:  # noqa: ANN401
            reply = self._client.head_object(**self._at(key))
            return whole(reply, "ContentLength", "LastModified")

        try:
            reply = self._repeat(head, deadline, key, 404)
        except StatusError:
            self._check_exists(deadline)
            return None
        modified = reply["LastModified"].timestamp()
        return ObjectInfo(key=key, nbytes=reply["ContentLength"], modified=modified)

    def head(self, key: str, deadline: Deadline) -> ObjectInfo:
        """Look up an object that must exist.

        Raises:
            ObjectNotFoundError: No object has this key.
        """
        found = self.find(key, deadline)
        if found is None:
            raise not_found(key, self.url)
        return found

    def put(self, key: str, view: memoryview, deadline: Deadline, holds: Holds) -> None:
        """Write an object, in parts if it is large.

        Args:
            key: Key of the object.
            view: Bytes of the object.
            deadline: Deadline of the call.
            holds: Check of the stored bytes, for responses that do not prove the write.
        """

        def put() -> None:
            reply = self._client.put_object(**at, Body=_body(view, deadline))
            self._prove(str(reply.get("ETag", "")), view, holds)

        at = self._at(key)
        if view.nbytes > PART_NBYTES:
            self._uploader.upload(at, key, view, deadline, holds)
        else:
            self._repeat(put, deadline, key)

    def put_if_absent(self, key: str, view: memoryview, deadline: Deadline, holds: Holds) -> None:
        """Write an object if the key has none.

        Args:
            key: Key of the object.
            view: Bytes of the object.
            deadline: Deadline of the call.
            holds: Check of the stored bytes, for attempts without a response, or whose response
                does not prove the write.

        Raises:
            AlreadyExistsError: The key has an object not known to be written by this call.
            ConfigError: The server ignores the condition.
        """
        if self._create(key, view, deadline, holds):
            self._exists = True
            if not self._conditions_hold:
                self._try_condition(key, view, deadline)

    def delete(self, key: str, deadline: Deadline) -> None:
        """Delete an object if it exists."""
        self._repeat(lambda: self._client.delete_object(**self._at(key)), deadline, key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Iterate over objects by prefix, with the server's names and in its order."""
        page = {"Bucket": self._bucket, "Prefix": f"{self._prefix}{prefix}"}

        def get() -> Any:  # noqa: ANN401
            return self._client.list_objects_v2(**page)

        while True:
            reply = self._repeat(get, self.deadline(prefix), prefix)
            for entry in reply.get("Contents", []):
                yield ObjectInfo(
                    key=entry["Key"].removeprefix(self._prefix),
                    nbytes=entry["Size"],
                    modified=entry["LastModified"].timestamp(),
                )
            if not reply.get("IsTruncated"):
                return
            page["ContinuationToken"] = reply["NextContinuationToken"]

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": f"{self._prefix}{key}"}

    def _repeat(
        self, call: Callable[[], _T], deadline: Deadline, key: str, *answers: int, nbytes: int = 0
    ) -> _T:
        """Send a request through ``Calls.repeat``; a success shows that the bucket exists."""
        reply = self._calls.repeat(call, deadline, key, *answers, nbytes=nbytes)
        self._exists = True
        return reply

    def _check_exists(self, deadline: Deadline) -> None:
        """Raise if the bucket is absent: HEAD answers the same for an absent object and bucket."""
        if self._exists:
            return
        try:
            # 403 also means that the bucket exists, without permission to look it up.
            self._repeat(
                lambda: self._client.head_bucket(Bucket=self._bucket), deadline, "", 403, 404
            )
        except StatusError as exc:
            if exc.status == 404:
                raise no_bucket(self.url) from exc
        self._exists = True

    def _prove(self, etag: str, view: memoryview, holds: Holds) -> None:
        """Verify that the server has the object that it reported as written.

        Raises:
            AnswerError: The server does not have it.
        """
        if self._etags.show(etag, view):
            return
        if not holds():
            raise wrote_nothing()
        self._etags.learn(etag, view)

    def _put_absent(self, key: str, view: memoryview, deadline: Deadline) -> str:
        """Try to write an object if the key has none; return its ETag."""

        def put() -> Any:  # noqa: ANN401
            body = _body(view, deadline)
            return self._client.put_object(**self._at(key), Body=body, IfNoneMatch="*")

        return str(once(put, deadline).get("ETag", ""))

    def _create(self, key: str, view: memoryview, deadline: Deadline, holds: Holds) -> bool:
        """Write as ``put_if_absent``; return whether the last attempt wrote the object."""
        attempt, unanswered = 0, False
        while True:
            try:
                self._prove(self._put_absent(key, view, deadline), view, holds)
            except DeltaChainError:
                raise
            except Exception as exc:  # see Calls.repeat
                if status_of(exc) == 412:
                    self._conditions_hold = True
                    if unanswered and holds():
                        return False
                    raise already_exists(key, self.url) from exc
                # A conflict or refusal wrote nothing; after any other error the object may exist.
                unanswered |= not is_conflict(exc) and not 400 <= status_of(exc) < 500
                if not is_transient(exc) or not deadline.pause(attempt):
                    raise typed(exc, key, self.url) from exc
                attempt += 1
            else:
                return True

    def _try_condition(self, key: str, view: memoryview, deadline: Deadline) -> None:
        """Repeat a conditional write that succeeded; refuse a server that accepts it again."""
        try:
            etag = self._put_absent(key, view, deadline)
        except DeltaChainError:
            raise
        except Exception as exc:  # noqa: BLE001 - see Calls.repeat
            # After another response, or none, the check is repeated with the next object.
            self._conditions_hold = status_of(exc) == 412
            return
        if not self._etags.show(etag, view):
            return  # not a response of the server
        raise ConfigError(
            f"the server of {self.url} ignores If-None-Match, so that two publishers can both win",
            hint="keep the chain on a server that has conditional writes",
        )


def _body(view: memoryview, deadline: Deadline) -> _Body:
    return bytes(view) if view.nbytes <= _SMALL else Upload(view, deadline)


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise ConfigError("the option deadline_s of an s3:// store must be seconds, above 0")
    return float(value)
