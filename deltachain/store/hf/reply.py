"""Replies of the Hub, read in bounded time and memory."""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from deltachain.store.base import MAX_DOCUMENT

_CODINGS: Final = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""The ``wbits`` of zlib for each content encoding that a server may apply without request."""


class ReplyError(Exception):
    """A reply from another server than the Hub; the request is retried."""


class RedirectedError(Exception):
    """A redirect to another server, by a captive portal or a proxy.

    Args:
        status: HTTP status of the redirect.
        target: Destination of the redirect.
    """

    def __init__(self, status: int, target: str) -> None:
        super().__init__(f"answered by a redirect ({status})")
        self.hint = (
            f"the endpoint redirects to {target or 'itself'}: check HF_ENDPOINT or the option "
            "endpoint, its scheme too, and what is in between"
        )


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply.

    Attributes:
        status: HTTP status.
        headers: Headers by case-insensitive name.
        words: Error message of the Hub, verbatim; never contains the token.
        body: The whole body.
        following: URL of a listing's next page; empty on the last page.
    """

    status: int
    headers: Mapping[str, str]
    words: str
    body: bytes
    following: str = ""

    def document(self) -> Any:  # noqa: ANN401 - JSON
        """Parse the body as JSON.

        Raises:
            ReplyError: It is not JSON: a proxy or a captive portal answered instead.
        """
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as exc:
            raise ReplyError("the answer is not JSON") from exc


class Until:
    """Socket timeout that ends at a fixed time: evaluated anew before each read.

    A plain number restarts with every byte, so that a request to a server that sends one byte a
    second would never time out.
    """

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def __float__(self) -> float:
        """Return the remaining seconds.

        Raises:
            TimeoutError: No time is left.
        """
        left_s = self._at - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the time of the request is over")
        return left_s

    def __index__(self) -> int:
        """Return the remaining whole seconds: sockets ask objects other than ``float`` for them."""
        return math.ceil(float(self))


def read_reply(response: Any, until: Until, limit: int = MAX_DOCUMENT) -> Reply:  # noqa: ANN401
    """Read the body of a response whose headers were received.

    Args:
        response: Response of ``httpx`` or ``httpx2`` with an unread body.
        until: Deadline of the read.
        limit: Largest body, in bytes after decompression.

    Raises:
        ReplyError: The body is longer, or has an unsupported content encoding.
        TimeoutError: The deadline passed.
    """
    reason = response.headers.get("X-Error-Message") or response.reason_phrase
    return Reply(
        status=response.status_code,
        headers=response.headers,
        words=f"{response.request.method} {response.request.url.path}: "
        f"{response.status_code} {reason}",
        body=_read_body(response, until, limit),
        following=response.links.get("next", {}).get("url", ""),
    )


def check_redirect(response: Any) -> None:  # noqa: ANN401 - as above
    """Accept only a redirect that repeats the request at the same server, as for a renamed bucket.

    Any other redirect would drop the body, or send it to another server.

    Raises:
        RedirectedError: The redirect is of another kind.
    """
    following, url = response.next_request, response.request.url
    if following is None:
        raise RedirectedError(response.status_code, "")
    where = following.url
    same = (where.scheme, where.host, where.port) == (url.scheme, url.host, url.port)
    if response.status_code not in (307, 308) or not same:
        host = f"{where.host}:{where.port}" if where.port else where.host
        raise RedirectedError(response.status_code, f"{where.scheme}://{host}")


def _read_body(response: Any, until: Until, limit: int) -> bytes:  # noqa: ANN401
    coding = response.headers.get("Content-Encoding", "").strip().lower()
    if coding in ("", "identity"):
        undo = None
    elif coding in _CODINGS:
        undo = zlib.decompressobj(_CODINGS[coding])
    else:
        raise ReplyError(f"the answer is in the encoding {coding[:20]!r}, which nobody asked for")
    body = bytearray()
    try:
        for piece in response.iter_raw():
            float(until)
            body += piece if undo is None else undo.decompress(piece, limit + 1 - len(body))
            if len(body) > limit:
                raise ReplyError(f"the answer has more than {limit} bytes")
    except zlib.error as exc:
        raise ReplyError(f"the answer is not the {coding} that it says it is") from exc
    if undo is not None and not undo.eof:
        raise ReplyError("the answer ends early")
    return bytes(body)
