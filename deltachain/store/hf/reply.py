"""An answer of the Hub, read in bounded time and into bounded memory."""

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
"""How zlib is told to undo what a server was not asked to do."""


class ReplyError(Exception):
    """A reply that did not come from the Hub; the request is retried."""


class RedirectedError(Exception):
    """A redirect to another server, by a captive portal or a proxy.

    Args:
        status: Of the answer.
        target: Where it is sent.
    """

    def __init__(self, status: int, target: str) -> None:
        super().__init__(f"answered by a redirect ({status})")
        self.hint = (
            f"the endpoint redirects to {target or 'itself'}: check HF_ENDPOINT or the option "
            "endpoint, its scheme too, and what is in between"
        )


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer.

    Attributes:
        status: Of HTTP.
        headers: By name, whose case does not count.
        words: What the Hub says, in its own words and never with the token in it.
        body: All of it.
        following: Where the next page of a listing is; empty on the last one.
    """

    status: int
    headers: Mapping[str, str]
    words: str
    body: bytes
    following: str = ""

    def document(self) -> Any:  # noqa: ANN401 - JSON
        """The document in it.

        Raises:
            ReplyError: There is none: a proxy or a portal answered in the Hub's place.
        """
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as exc:
            raise ReplyError("the answer is not JSON") from exc


class Until:
    """Seconds until a moment, as a socket takes its timeout: counted anew before each read.

    A timeout that is a number begins anew with every byte, so that a server which sends one a
    second is never given up.
    """

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def __float__(self) -> float:
        """Seconds until then.

        Raises:
            TimeoutError: It has come.
        """
        left_s = self._at - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the time of the request is over")
        return left_s

    def __index__(self) -> int:
        """The same in whole seconds: sockets ask numbers that are no ``float`` for these."""
        return math.ceil(float(self))


def read_reply(response: Any, until: Until, limit: int = MAX_DOCUMENT) -> Reply:  # noqa: ANN401
    """Read an answer whose head is here.

    Args:
        response: Of ``httpx`` or ``httpx2``, of whose body nothing was read.
        until: When to give up.
        limit: Bytes of the longest body, as it was before a server compressed it.

    Raises:
        ReplyError: Its body is longer, or of an encoding that nobody asked for.
        TimeoutError: It took too long.
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
    """Let a redirect pass that repeats the request at the same server, as for a renamed bucket.

    Any other would drop what is sent, or carry it to somebody else.

    Raises:
        RedirectedError: It is another one.
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
