"""Validation of responses from an S3 server."""

from __future__ import annotations

import hashlib
import re
from typing import Any, Final
from urllib.parse import urlsplit

_SPAN: Final = re.compile(r"bytes (?P<first>\d{1,19})-(?P<last>\d{1,19})/(?P<total>\d{1,19})")
_REGION: Final = re.compile(r"[a-z]{2}[a-z0-9-]{1,30}")
_HOST: Final = re.compile(r"[A-Za-z0-9.:\[\]-]{1,255}")
_PLAIN: Final = frozenset({"", "identity", "aws-chunked"})


class AnswerError(Exception):
    """An answer that cannot be that of the server, or was cut: it counts as lost.

    Args:
        reason: What is wrong with it.
        hint: What to do if it stays so.
    """

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint


def whole(reply: dict[str, Any], *fields: str) -> dict[str, Any]:
    """Return a response that has all of some fields; one without was cut in its headers.

    Raises:
        AnswerError: It was.
    """
    missing = [field for field in fields if field not in reply]
    if missing:
        raise AnswerError(f"an answer without {', '.join(missing)}")
    return reply


def object_nbytes(reply: dict[str, Any], span: tuple[int, int] | None) -> int:
    """How many bytes the object has that an answer brings, or brings a part of.

    Args:
        reply: The answer to a GET.
        span: The first byte that was asked for and the one behind the last; None for the object.

    Raises:
        AnswerError: It brings something else.
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
    return nbytes  # the bytes asked for are its first ones


def redirects(reply: dict[str, Any]) -> bool:
    """Whether an answer sends the client elsewhere, of which botocore makes nothing by itself.

    Of a bucket in another region S3 names that, and botocore asks there, once. Without a name it
    would look the bucket up by a request that is redirected as well, without end.
    """
    return 300 <= reply["status_code"] < 400 and not region_of(reply["headers"])


def region_of(headers: Any) -> str:  # noqa: ANN401 - botocore has several
    """The region that an answer says a bucket is in; empty if it says none."""
    said = str(headers.get("x-amz-bucket-region", ""))
    return said if _REGION.fullmatch(said) else ""


def target_of(location: str) -> str:
    """Where a redirect leads: without its path, which may have parts of a signature in it."""
    try:
        parts = urlsplit(location)
    except ValueError:
        return "elsewhere"
    if parts.scheme not in ("http", "https") or not _HOST.fullmatch(parts.netloc):
        return "elsewhere"
    return f"{parts.scheme}://{parts.netloc}"


def wrote_nothing() -> AnswerError:
    """Build the error for a write that was answered, and whose object is not there."""
    return AnswerError(
        "a success that wrote nothing",
        "something between here and the server answers in its place: a portal, a proxy, a cache",
    )


class ETags:
    """Whether the answer to a write shows that the server has the bytes.

    An ETag is the MD5 of the object on most servers, and always on some. Something in between that
    answers 200 by itself gives none, or one of its own.
    """

    def __init__(self) -> None:
        self._others = False

    def show(self, etag: str, view: memoryview) -> bool:
        """Whether an ETag is proof enough; else only reading the object is."""
        if not etag:
            return False
        return self._others or etag.strip('"') == _md5(view)

    def learn(self, etag: str, view: memoryview) -> None:
        """Note that the server has the object which it gave this ETag to."""
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
