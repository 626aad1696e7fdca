"""Requests on one bucket: repeated while they fail for reasons that pass, with errors of ours."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias, TypeVar

from botocore.exceptions import ConnectionClosedError

from deltachain.errors import AlreadyExistsError, ConfigError
from deltachain.store.base import ObjectInfo, not_found, too_short
from deltachain.store.ranges import Opened, ReplacedError
from deltachain.store.retry import DEADLINE_S, Deadline
from deltachain.store.s3_body import Download, Upload
from deltachain.store.s3_client import make_client
from deltachain.store.s3_errors import (
    FAILURES,
    code_of,
    is_conflict,
    is_transient,
    no_bucket,
    status_of,
    typed,
)
from deltachain.store.s3_upload import PART_NBYTES, Uploader

_SMALL: Final = 1 << 20
"""Bytes that a socket takes in one call on the slowest network."""

_Body: TypeAlias = bytes | Upload
_T = TypeVar("_T")


class _AnswerError(Exception):
    """An answer that the caller of a request asked to be told of."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Bucket:
    """The objects below a prefix of a bucket; thread-safe.

    Args:
        name: The bucket.
        prefix: Of every key; empty, or with a slash at its end.
        options: See ``open_s3``.

    Raises:
        ConfigError: The options, the environment or the profile do not make a client.
    """

    def __init__(self, name: str, prefix: str, options: Mapping[str, Any]) -> None:
        self._bucket = name
        self._prefix = prefix
        self._stall_s = _seconds(options.get("deadline_s", DEADLINE_S))
        self._client, own_endpoint = make_client(options, deadline_s=self._stall_s)
        self._uploader = Uploader(self._client, self._stall_s)
        self._conditions_hold = not own_endpoint
        self._exists = False
        self._lock = threading.Lock()
        self._requests = 0
        self._client.meta.events.register("before-send.s3", self._count)

    @property
    def url(self) -> str:
        """``s3://``, the bucket and the prefix."""
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    @property
    def requests(self) -> int:
        """Every HTTP request that was sent, those that were repeated too."""
        return self._requests

    def deadline(self, key: str, nbytes: int = 0) -> Deadline:
        """How long a call on this object may take from now on."""
        return Deadline(key, self.url, self._stall_s, nbytes)

    def close(self) -> None:
        """Give the connections back."""
        self._client.close()

    def open(self, key: str, deadline: Deadline, *, pin: str = "", bytes_: str = "") -> Opened:
        """Open an object, or bytes of it as a ``Range`` header names them.

        Raises:
            ObjectNotFoundError: No object has this key.
            ReplacedError: It is not the one that ``pin`` names.
        """
        pinned = {"IfMatch": pin} if pin else {}
        ranged = {"Range": f"bytes={bytes_}"} if bytes_ else {}

        def get() -> Any:  # noqa: ANN401
            reply = self._client.get_object(**self._at(key), **pinned, **ranged)
            partial = reply["ResponseMetadata"]["HTTPStatusCode"] == 206
            fields = ("ContentRange",) if partial else ()
            return _whole(reply, "ContentLength", "LastModified", *fields)

        try:
            reply = self._call(get, deadline, key, 404, 412, 416)
        except _AnswerError as exc:
            if exc.status == 404:
                raise not_found(key, self.url) from exc
            if exc.status == 412 or pin:  # a range of the object that was pinned is inside it
                raise ReplacedError from exc
            raise
        total = reply.get("ContentRange", "").rpartition("/")[2]
        if ranged and not total.isdecimal():
            reply["Body"].close()
            raise ConfigError(
                f"{self.url}: the server does not answer requests for a part of an object",
                hint="keep the chain on another server",
            )
        nbytes = int(total) if ranged else reply["ContentLength"]
        return Opened(Download(reply["Body"]), nbytes, reply.get("ETag", ""))

    def open_range(
        self, key: str, start: int, stop: int, deadline: Deadline, pin: str = ""
    ) -> Opened:
        """Open bytes ``start`` to ``stop`` of an object.

        Raises:
            ObjectNotFoundError: No object has this key.
            MalformedError: It has no byte ``start``.
            ReplacedError: It is not the one that ``pin`` names.
        """
        try:
            return self.open(key, deadline, pin=pin, bytes_=f"{start}-{stop - 1}")
        except _AnswerError as exc:
            nbytes = self.head(key, deadline).nbytes
            raise too_short(key, self.url, nbytes=nbytes, end=stop) from exc

    def find(self, key: str, deadline: Deadline) -> ObjectInfo | None:
        """Look an object up.

        Raises:
            ConfigError: The bucket does not exist.
        """

        def head() -> Any:  # noqa: ANN401
            reply = self._client.head_object(**self._at(key))
            return _whole(reply, "ContentLength", "LastModified")

        try:
            reply = self._call(head, deadline, key, 404)
        except _AnswerError:
            self._check_exists(deadline)
            return None
        modified = reply["LastModified"].timestamp()
        return ObjectInfo(key=key, nbytes=reply["ContentLength"], modified=modified)

    def head(self, key: str, deadline: Deadline) -> ObjectInfo:
        """Look up an object that must be there.

        Raises:
            ObjectNotFoundError: It is not.
        """
        found = self.find(key, deadline)
        if found is None:
            raise not_found(key, self.url)
        return found

    def put(self, key: str, view: memoryview, deadline: Deadline) -> None:
        """Write an object, in parts if it is large."""
        if view.nbytes > PART_NBYTES:
            name = self._at(key)["Key"]
            try:
                self._uploader.upload(self._bucket, name, view, deadline)
            except FAILURES as exc:
                raise typed(exc, key, self.url) from exc
            return
        self._call(
            lambda: self._client.put_object(**self._at(key), Body=_body(view, deadline)),
            deadline,
            key,
        )

    def put_if_absent(
        self, key: str, view: memoryview, deadline: Deadline, holds: Callable[[], bool]
    ) -> None:
        """Write an object under a key that has none.

        Args:
            key: The object.
            view: Its bytes.
            deadline: When to give up.
            holds: Whether the object that has the key is this one.

        Raises:
            AlreadyExistsError: The key has an object, and it is not known to be ours.
            ConfigError: The server ignores the condition.
        """
        attempt, unanswered = 0, False
        while True:
            try:
                self._put_absent(key, view, deadline)
            except FAILURES as exc:
                if status_of(exc) == 412:
                    self._conditions_hold = True
                    if unanswered and holds():
                        return
                    message = f"{self.url} already has an object {key!r}"
                    raise AlreadyExistsError(message, key=key, url=self.url) from exc
                # A conflict or a refusal wrote nothing; after all else the object may be there.
                unanswered |= not is_conflict(exc) and not 400 <= status_of(exc) < 500
                if not is_transient(exc) or not deadline.pause(attempt):
                    raise typed(exc, key, self.url) from exc
                attempt += 1
            else:
                break
        self._exists = True
        if not self._conditions_hold:
            self._try_condition(key, view, deadline)

    def delete(self, key: str, deadline: Deadline) -> None:
        """Remove an object if there is one."""
        self._call(lambda: self._client.delete_object(**self._at(key)), deadline, key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose name begins with ``prefix``, in the order and names of the server."""
        page = {"Bucket": self._bucket, "Prefix": f"{self._prefix}{prefix}"}

        def get() -> Any:  # noqa: ANN401
            return self._client.list_objects_v2(**page)

        while True:
            reply = self._call(get, self.deadline(prefix), prefix)
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

    def _count(self, **_: object) -> None:
        with self._lock:
            self._requests += 1

    def _call(self, call: Callable[[], _T], deadline: Deadline, key: str, *answers: int) -> _T:
        """Send one request, again and again while it fails for reasons that pass.

        Raises:
            _AnswerError: The status is one of ``answers``.
        """
        attempt = 0
        while True:
            try:
                reply = call()
            except FAILURES as exc:
                if status_of(exc) in answers and code_of(exc) != "NoSuchBucket":
                    raise _AnswerError(status_of(exc)) from exc
                if not is_transient(exc) or not deadline.pause(attempt):
                    raise typed(exc, key, self.url) from exc
                attempt += 1
            else:
                self._exists = True
                return reply

    def _check_exists(self, deadline: Deadline) -> None:
        """Tell an absent object from an absent bucket, of which a HEAD says the same."""
        if self._exists:
            return
        try:
            # 403 is an answer too: of a bucket that is there, and may not be looked up.
            self._call(
                lambda: self._client.head_bucket(Bucket=self._bucket), deadline, "", 403, 404
            )
        except _AnswerError as exc:
            if exc.status == 404:
                raise no_bucket(self.url) from exc
        self._exists = True

    def _put_absent(self, key: str, view: memoryview, deadline: Deadline) -> None:
        self._client.put_object(**self._at(key), Body=_body(view, deadline), IfNoneMatch="*")

    def _try_condition(self, key: str, view: memoryview, deadline: Deadline) -> None:
        """Write an object once more that was just written; a server that takes it is refused."""
        try:
            self._put_absent(key, view, deadline)
        except FAILURES as exc:
            # After another answer, or none, the next object is tried instead.
            self._conditions_hold = status_of(exc) == 412
            return
        raise ConfigError(
            f"the server of {self.url} ignores If-None-Match, so that two publishers can both win",
            hint="keep the chain on a server that has conditional writes",
        )


def _whole(reply: dict[str, Any], *fields: str) -> dict[str, Any]:
    """An answer, if it has what it must have: one that was cut in its head counts as lost.

    Raises:
        ConnectionClosedError: It was.
    """
    if all(field in reply for field in fields):
        return reply
    if "Body" in reply:
        reply["Body"].close()
    raise ConnectionClosedError(endpoint_url="")


def _body(view: memoryview, deadline: Deadline) -> _Body:
    return bytes(view) if view.nbytes <= _SMALL else Upload(view, deadline)


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise ConfigError("the option deadline_s of an s3:// store must be seconds, above 0")
    return float(value)
