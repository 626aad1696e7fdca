"""Requests to an S3 server, in bounded time and with retries."""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # noqa: A004 - its name
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    HTTPClientError,
    IncompleteReadError,
    NoAuthTokenError,
    NoCredentialsError,
    PartialCredentialsError,
    SSLError,
    SSOError,
    TokenRetrievalError,
)

from deltachain.errors import (
    ConfigError,
    DeltaChainError,
    StorePermissionError,
    StoreUnavailableError,
)
from deltachain.retry import Deadline
from deltachain.store.base import Outage, ServerClock
from deltachain.store.bounds import bounded
from deltachain.store.s3.client import Client

_SPAN: Final = re.compile(r"bytes (?P<first>\d{1,19})-(?P<last>\d{1,19})/(?P<total>\d{1,19})")
_REGION: Final = re.compile(r"[a-z]{2}[a-z0-9-]{1,30}")
_HOST: Final = re.compile(r"[A-Za-z0-9.:\[\]-]{1,255}")
_PLAIN: Final = frozenset({"", "identity", "aws-chunked"})


class AnswerError(Exception):
    """A response that was cut or does not come from the server; treated as lost.

    Args:
        reason: Defect of the response.
        hint: Remedy if the error persists.
    """

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint


def whole(reply: dict[str, Any], *fields: str) -> dict[str, Any]:
    """Return a response if it has all given fields; otherwise its headers were cut.

    Raises:
        AnswerError: A field is missing.
    """
    missing = [field for field in fields if field not in reply]
    if missing:
        raise AnswerError(f"an answer without {', '.join(missing)}")
    return reply


def object_nbytes(reply: dict[str, Any], span: tuple[int, int] | None) -> int:
    """Return the size of the whole object of a response, in bytes.

    Args:
        reply: Response to a GET.
        span: First requested byte, and the end, exclusive; None for the whole object.

    Raises:
        AnswerError: The response has another range.
    """
    whole(reply, "ContentLength", "LastModified")
    encoding = str(reply.get("ContentEncoding", "")).lower()
    if encoding not in _PLAIN:
        raise AnswerError(
            f"a body in the encoding {encoding[:20]!r}, which nobody asked for",
            "something between here and the server compresses: let it leave these answers alone",
        )
    nbytes, partial = int(reply["ContentLength"]), _status(reply) == 206
    if span is None:
        if partial:
            raise AnswerError("a part of an object, where all of it was asked for")
        return nbytes
    if partial:
        return _total(str(reply.get("ContentRange", "")), nbytes, span)
    if span[0]:
        raise AnswerError(
            "a whole object, where a part of it was asked for",
            "keep the chain on a server, and behind proxies, that heed Range",
        )
    return nbytes  # the range is at the start of the object


def redirects(reply: dict[str, Any]) -> bool:
    """Return whether a response is a redirect that botocore must not follow.

    For a bucket in another region, S3 names the region, and botocore retries there once. Without
    that name, botocore would look up the bucket by a request that is redirected too, endlessly.
    """
    return 300 <= reply["status_code"] < 400 and not region_of(reply["headers"])


def region_of(headers: Any) -> str:  # noqa: ANN401 - botocore has several
    """Return the bucket's region by the headers of a response; empty if absent."""
    said = str(headers.get("x-amz-bucket-region", ""))
    return said if _REGION.fullmatch(said) else ""


def target_of(location: str) -> str:
    """Return the target of a redirect without its path, which may contain a signature."""
    try:
        parts = urlsplit(location)
    except ValueError:
        return "elsewhere"
    if parts.scheme not in ("http", "https") or not _HOST.fullmatch(parts.netloc):
        return "elsewhere"
    return f"{parts.scheme}://{parts.netloc}"


def wrote_nothing() -> AnswerError:
    """Build the error for a write with a successful response but without an object."""
    return AnswerError(
        "a success that wrote nothing",
        "something between here and the server answers in its place: a portal, a proxy, a cache",
    )


class ETags:
    """Check of the ETag in the response to a write.

    On most servers, an ETag is the MD5 of the object, on some always. A proxy that answers 200
    itself sends no ETag, or one of its own.
    """

    def __init__(self) -> None:
        self._others = False

    def show(self, etag: str, view: memoryview) -> bool:
        """Return whether an ETag proves the write; otherwise the object must be read back."""
        if not etag:
            return False
        return self._others or etag.strip('"') == _md5(view)

    def learn(self, etag: str, view: memoryview) -> None:
        """Record the ETag of a stored object: kinds other than MD5 then count as proof too."""
        self._others = self._others or (bool(etag) and etag.strip('"') != _md5(view))


def _md5(view: memoryview) -> str:
    return hashlib.md5(view, usedforsecurity=False).hexdigest()


def _status(reply: dict[str, Any]) -> int:
    return int(reply["ResponseMetadata"]["HTTPStatusCode"])


def _total(said: str, nbytes: int, span: tuple[int, int]) -> int:
    match = _SPAN.fullmatch(said)
    start, stop = span
    if match is not None:
        first, last, total = int(match["first"]), int(match["last"]), int(match["total"])
        if first == start and last == min(stop, total) - 1 and nbytes == last - first + 1:
            return total
    raise AnswerError(
        f"{nbytes} bytes of the range {said[:60]!r}, where bytes {start} to {stop - 1} were "
        "asked for",
        "a proxy or a cache on the way mixes ranges up: let it leave these answers alone",
    )


_RETRIED_STATUS: Final = frozenset({408, 429, 500, 502, 503, 504})
_RETRIED_CODE: Final = frozenset(
    {
        "InternalError",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
    }
)
_CONFLICT: Final = frozenset({"ConditionalRequestConflict", "OperationAborted"})
_FULL: Final = frozenset({"InsufficientStorage", "QuotaExceeded", "XMinioStorageFull"})
_CREDENTIALS: Final = frozenset({"ExpiredToken", "InvalidToken", "TokenRefreshRequired"})

_NO_CONNECTION: Final = (ConnectTimeoutError, EndpointConnectionError)
_NO_CREDENTIALS: Final = (
    CredentialRetrievalError,
    NoAuthTokenError,
    NoCredentialsError,
    PartialCredentialsError,
    SSOError,
    TokenRetrievalError,
)

_HINT_CREDENTIALS: Final = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, or give the store options "
    "key and secret, or profile"
)
_HINT_REFUSED: Final = (
    "check the credentials and what they may do at this URL; AWS refuses to say that an object is "
    "absent to those who may not list the bucket (s3:ListBucket)"
)
_HINT_CLOCK: Final = "set the clock of this machine: the server refuses signatures of another time"
_HINT_CA: Final = (
    "name the certificate of the CA that signed the server's in SSL_CERT_FILE or AWS_CA_BUNDLE"
)
_HINT_ENDPOINT: Final = (
    "check host and port of the endpoint, and whether the server runs; it may be down for now"
)
_HINT_FULL: Final = "the server is full, or the quota is used up: free some space, then try again"
_HINT_REGION: Final = "the bucket is in the region {}: set AWS_REGION or the store option region"


def status_of(failure: Exception) -> int:
    """Return the HTTP status of the response; 0 without a response."""
    if isinstance(failure, ClientError):
        return int(failure.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return 0


def code_of(failure: Exception) -> str:
    """Return the S3 error code; without a response, the kind of failure."""
    if isinstance(failure, ClientError):
        return str(failure.response.get("Error", {}).get("Code", ""))
    return type(failure).__name__


def is_answer(failure: Exception) -> bool:
    """Return whether the request got a response."""
    return isinstance(failure, ClientError | AnswerError)


def is_conflict(failure: Exception) -> bool:
    """Return whether a concurrent write of the key caused the failure: none was done, retry."""
    return code_of(failure) in _CONFLICT


def given_up(failure: Exception) -> StoreUnavailableError | None:
    """Return our own error if it ended the request and boto3 wrapped it as a send failure."""
    error = failure.kwargs.get("error") if isinstance(failure, HTTPClientError) else None
    return error if isinstance(error, StoreUnavailableError) else None


def is_transient(failure: Exception) -> bool:
    """Return whether a retry of the request may succeed.

    An unparsable response counts as transient, whatever its parser raised.
    """
    if isinstance(failure, ClientError):
        if code_of(failure) in _FULL:
            return False
        known = code_of(failure) in _RETRIED_CODE or is_conflict(failure)
        return known or status_of(failure) in _RETRIED_STATUS
    if given_up(failure) or isinstance(failure, SSLError):
        return False  # an invalid certificate stays invalid
    if isinstance(failure, BotoCoreError):
        return isinstance(failure, ConnectionError | HTTPClientError | IncompleteReadError)
    return not isinstance(failure, RecursionError | MemoryError)


def typed(failure: Exception, key: str, url: str) -> DeltaChainError:
    """Convert a failure to an error of deltachain, with a hint.

    It repeats only the error's code: messages of the server or boto3 may contain parts of a
    request, and so credentials.
    """
    ours = given_up(failure)
    if ours is not None:
        return ours
    status, code = status_of(failure), code_of(failure)
    answer = f"{status} {code}" if status else code
    if isinstance(failure, _NO_CONNECTION):
        where = failure.kwargs.get("endpoint_url", "")
        answer += f": nothing answers at {_origin(where)}{_said_by(where)}"
    if isinstance(failure, AnswerError):
        answer = f"answered by {failure.reason}"
    message = f"object {key!r} in {url}: {answer}" if key else f"{url}: {answer}"
    refused = _refused(failure)
    if refused:
        return StorePermissionError(message, key=key, url=url, hint=refused)
    if code == "NoSuchBucket":
        return no_bucket(url)
    hint = _unavailable(failure)
    if hint is not None:
        return StoreUnavailableError(message, key=key, url=url, hint=hint)
    return ConfigError(message, hint="the server does not take such a request: see its log")


def _origin(url: str) -> str:
    """Return scheme, host and port: the rest names an object, and may hold a signature."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _said_by(url: str) -> str:
    """Return what names the endpoint of a URL, if it is not AWS's own."""
    host = urlsplit(url).hostname or ""
    if host.endswith((".amazonaws.com", ".amazonaws.com.cn")):
        return ""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        named = urlsplit(os.environ.get(name, "")).hostname
        if named and (host == named or host.endswith(f".{named}")):
            return f", the endpoint in {name}"
    return ", the endpoint of the option endpoint_url or of the profile"


def _refused(failure: Exception) -> str:
    """Return the hint about credentials; empty for other failures."""
    if isinstance(failure, _NO_CREDENTIALS):
        return _HINT_CREDENTIALS
    code = code_of(failure)
    if code in _FULL or (status_of(failure) not in (401, 403) and code not in _CREDENTIALS):
        return ""
    return _HINT_CLOCK if code == "RequestTimeTooSkewed" else _HINT_REFUSED


def _unavailable(failure: Exception) -> str | None:
    """Return the hint for a temporary failure; None for a permanent one."""
    if isinstance(failure, AnswerError):
        return failure.hint
    if code_of(failure) in _FULL or status_of(failure) == 507:
        return _HINT_FULL
    if isinstance(failure, ClientError) and 300 <= status_of(failure) < 400:
        headers = failure.response["ResponseMetadata"].get("HTTPHeaders", {})
        return _HINT_REGION.format(region_of(headers) or "that its answers name")
    if isinstance(failure, SSLError):
        return _HINT_CA
    if isinstance(failure, _NO_CONNECTION):
        return _HINT_ENDPOINT
    foreseen = isinstance(failure, ClientError | BotoCoreError)
    return "" if is_transient(failure) or not foreseen else None


def no_bucket(url: str) -> ConfigError:
    """Build the error for an absent bucket."""
    return ConfigError(
        f"the bucket of {url} does not exist",
        hint=f"create it (aws s3 mb s3://{url.split('/')[2]}), or correct the URL, the endpoint or "
        "the region",
    )


_T = TypeVar("_T")

_body: Final[ContextVar[Any]] = ContextVar("deltachain_s3_body", default=None)
"""Response body of the thread's current request."""

_REDIRECT: Final = (
    "the endpoint redirects to {}: check the endpoint URL, its scheme too, and what is in between"
)


class StatusError(Exception):
    """An HTTP status handled by the caller."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Calls:
    """Sender of a client's requests, with retries; thread-safe.

    Args:
        client: Client without retries of its own.
        url: URL of the store, for errors.

    Attributes:
        clock: Clock of the server.
        outage: Whether it answers.
    """

    def __init__(self, client: Client, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._requests = 0
        self.clock: Final = ServerClock()
        self.outage: Final = Outage()
        client.meta.events.register("before-send.s3", self._count)
        client.meta.events.register("before-parse.s3", self._hear)
        refuse_redirects(client)

    @property
    def requests(self) -> int:
        """Number of HTTP requests so far, retries included."""
        return self._requests

    def repeat(
        self,
        call: Callable[[], _T],
        deadline: Deadline,
        key: str,
        *answers: int,
        nbytes: int = 0,
    ) -> _T:
        """Send one request; retry after transient failures.

        Args:
            call: Function that sends the request.
            deadline: Deadline of the call.
            key: Key of the object, for errors.
            answers: Statuses handled by the caller.
            nbytes: Size of the object in the response, in bytes.

        Raises:
            StatusError: The status is one of ``answers``.
        """
        attempt, began = 0, time.monotonic()
        answer: Exception | None = None
        while True:
            try:
                return self._once(call, deadline, nbytes)
            except DeltaChainError:
                raise
            except Exception as exc:  # a response may cause any error in its parser
                if status_of(exc) in answers and code_of(exc) != "NoSuchBucket":
                    raise StatusError(status_of(exc)) from exc
                if is_answer(exc):
                    answer = exc.with_traceback(None)  # a reference cycle with this frame otherwise
                is_lost = self.outage.is_lost(began)
                if is_lost or not is_transient(exc) or not deadline.pause(attempt):
                    # A timeout of the last attempt says less than the response before it.
                    raise typed(answer or exc, key, self._url) from (answer or exc)
                attempt += 1
                error = typed(answer or exc, "", self._url)
                self.outage.report(error.args[0], began, deadline.left_s)

    def _once(self, call: Callable[[], _T], deadline: Deadline, nbytes: int) -> _T:
        """Send one request, and record whether it was answered."""
        sent = time.monotonic()
        try:
            found = once(call, deadline, nbytes=nbytes)
        except Exception as exc:
            if is_answer(exc):
                self.outage.answered()
            else:
                self.outage.unanswered(sent)
            raise
        self.outage.answered()
        return found

    def _count(self, **_: object) -> None:
        with self._lock:
            self._requests += 1

    def _hear(self, *, response_dict: dict[str, Any], **_: object) -> None:
        self.outage.is_known = True
        self.clock.hear(response_dict["headers"].get("date"))


def once(call: Callable[[], _T], deadline: Deadline, *, nbytes: int = 0) -> _T:
    """Send one request, which ends by the deadline whatever the server does."""
    token = _body.set(None)
    with bounded(deadline, nbytes):
        try:
            return call()
        except Exception:
            # The body of a response that botocore cannot parse has no other owner to close it.
            body: Any = _body.get()
            if hasattr(body, "close"):
                body.close()
            raise
        finally:
            _body.reset(token)


def refuse_redirects(client: Client) -> None:
    """Make redirected requests of a client fail with an ``AnswerError``."""
    client.meta.events.register("before-parse.s3", _see_answer)


def _see_answer(*, response_dict: dict[str, Any], **_: object) -> None:
    """Fail a redirected request before botocore follows the redirect.

    Raises:
        AnswerError: The response is a redirect.
    """
    _body.set(response_dict.get("body"))
    if redirects(response_dict):
        where = target_of(str(response_dict["headers"].get("location", "")))
        raise AnswerError(f"a redirect ({response_dict['status_code']})", _REDIRECT.format(where))
