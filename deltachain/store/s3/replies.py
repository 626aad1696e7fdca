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
