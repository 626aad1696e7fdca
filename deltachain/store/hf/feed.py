"""Feed of one bucket: a thread that reads the Hub's stream of changes, and connects again."""

from __future__ import annotations

import json
import logging
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from threading import Event, Lock, Thread, current_thread
from typing import Any, Final, Literal, TypeAlias, get_args

from typing_extensions import override

from deltachain.retry import Backoff
from deltachain.store.base import Feed, OnChange
from deltachain.store.hf.api import Hub, told_to_wait
from deltachain.threads import started

# The Hub documents no feed; the events are those that ``huggingface_hub`` 2.4 reads. Unknown and
# malformed ones are skipped.


Name: TypeAlias = Literal["ready", "changes", "reset", "reconnect"]

MOST_BYTES: Final = 4 << 20
"""Largest event, in bytes: 10,000 changes."""

_MOST_CURSOR: Final = 1024
_LINE_END: Final = re.compile(rb"\r\n|\n|\r(?!$)")  # a CR at the end may be half of a CRLF


class OversizedEventError(Exception):
    """An event has more than ``MOST_BYTES`` bytes: the stream is no feed."""


@dataclass(frozen=True, slots=True)
class FeedEvent:
    """One event.

    Attributes:
        name: ``ready``: earlier changes were sent, and new ones follow as they are made;
            ``changes``; ``reset``: the changes after the cursor are not known any more;
            ``reconnect``: the Hub ends the stream.
        cursor: Name of the place after this event, to resume there; empty if none was sent.
        paths: Paths of changed files, for ``changes``.
    """

    name: Name
    cursor: str = ""
    paths: tuple[str, ...] = ()


def parse_events(pieces: Iterable[bytes]) -> Iterator[FeedEvent]:
    """Yield the events in the bytes of a stream, as soon as each is complete.

    Raises:
        OversizedEventError: An event is too large.
    """
    name, data = b"", bytearray()
    for line in _lines(pieces):
        if not line:
            event = _parse(name, bytes(data))
            if event is not None:
                yield event
            name, data = b"", bytearray()
            continue
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"event":
            name = value
        elif field == b"data":
            data += value + b"\n"
            if len(data) > MOST_BYTES:
                raise OversizedEventError


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Split a stream into lines that end in LF, CR or CRLF."""
    rest = b""
    for piece in pieces:
        # Only a line that a piece ends is scanned again, so that many pieces cost no more than one.
        parts = _LINE_END.split(rest + piece) if _ends_line(rest, piece) else [rest + piece]
        yield from parts[:-1]
        rest = parts[-1]
        if len(rest) > MOST_BYTES:
            raise OversizedEventError


def _ends_line(rest: bytes, piece: bytes) -> bool:
    return b"\n" in piece or b"\r" in piece or rest.endswith(b"\r")


def _parse(name: bytes, data: bytes) -> FeedEvent | None:
    """Return an event; None for one to be skipped."""
    known = next((each for each in get_args(Name) if each.encode() == name), None)
    if known is None:
        return None
    try:
        document = json.loads(data) if data.strip() else {}
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    cursor = document.get("cursor")
    if not isinstance(cursor, str) or len(cursor) > _MOST_CURSOR or not cursor.isprintable():
        cursor = ""
    rows = document.get("changes") if known == "changes" else []
    if not isinstance(rows, list):
        return None
    return FeedEvent(known, cursor, tuple(_paths(rows)))


def _paths(rows: list[Any]) -> Iterator[str]:
    for row in rows:
        path = row.get("path") if isinstance(row, dict) else None
        if isinstance(path, str):
            yield path


SILENCE_S: Final = 75.0
"""Seconds without a byte after which a stream is dead: the Hub sends a comment every 30 s."""

_CONNECT_S: Final = 10.0


class AbsentFeedError(Exception):
    """The Hub has no feed for this bucket or token; another attempt would change nothing."""


class RefusedCursorError(Exception):
    """The Hub does not accept the cursor."""


class FeedUnavailableError(Exception):
    """The Hub answered with another status.

    Args:
        words: Path and status.
        wait_s: Seconds to wait, as the Hub says; 0 if it does not.
    """

    def __init__(self, words: str, wait_s: float) -> None:
        super().__init__(words)
        self.wait_s = wait_s


@contextmanager
def open_stream(hub: Hub, parameters: Mapping[str, str]) -> Iterator[Any]:
    """Yield the response with the events of a bucket, which ends after ``SILENCE_S`` of silence.

    It takes one request of the rate limit. Errors of the HTTP library pass through.

    Args:
        hub: Client of the bucket.
        parameters: ``cursor``, the place to resume after; or none, for later changes only.

    Raises:
        AbsentFeedError: There is no feed.
        RefusedCursorError: The Hub does not accept the cursor.
        FeedUnavailableError: The Hub cannot serve the feed now.
        StoreUnavailableError: The rate limit allows no request now.
    """
    from huggingface_hub.errors import OfflineModeIsEnabled  # noqa: PLC0415
    from huggingface_hub.utils import build_hf_headers, get_session  # noqa: PLC0415

    hub.admit(hub.deadline().shorter(0.0))
    session: Any = get_session()
    headers = build_hf_headers(token=hub.place.token, library_name="deltachain")
    times = {"connect": _CONNECT_S, "pool": _CONNECT_S, "write": _CONNECT_S, "read": SILENCE_S}
    request = session.build_request(
        "GET",
        f"{hub.root}/events",
        params=dict(parameters),
        headers=headers | {"Accept": "text/event-stream", "Accept-Encoding": "identity"},
        extensions={"timeout": times},
    )
    try:
        response = session.send(request, stream=True, follow_redirects=False)
    except OfflineModeIsEnabled as exc:
        raise AbsentFeedError(str(exc)) from exc
    with closing(response):
        _check(response)
        yield response


def _check(response: Any) -> None:  # noqa: ANN401 - of httpx or httpx2
    """Raise unless a response is a stream of events; see ``open_stream``."""
    status, headers = response.status_code, response.headers
    words = f"{response.request.url.path}: {status}"
    if status in (401, 403, 404, 501):
        raise AbsentFeedError(words)
    if status == 400:
        raise RefusedCursorError(words)
    coding = headers.get("Content-Encoding", "identity").strip().lower()
    if status != 200 or coding != "identity":
        raise FeedUnavailableError(words, told_to_wait(headers))
    if not headers.get("Content-Type", "").lower().startswith("text/event-stream"):
        raise AbsentFeedError(f"{words}, and no stream of events")


logger = logging.getLogger(__name__)

_SETTLED_S: Final = 60.0
"""Seconds after which a stream counts as a success, so that the next pause is short again."""

_PAUSES: Final = Backoff(1.0, 300.0, random_share=0.5)
"""Pauses between streams: each one is a request that the rate limit counts."""

_BURST: Final = 8 << 20
_RATE: Final = 256 << 10
"""Bytes a second, after a burst, above which a stream is given up: 1,000 changes a second."""

_CLOSE_S: Final = 1.0


class FloodError(Exception):
    """The stream has more bytes than a feed of changes."""


class HubFeed(Feed):
    """Changes below one path of a bucket, from a daemon thread that ends at ``close``.

    Args:
        hub: Client of the bucket.
        folder: Path of the store in the bucket, with a slash at its end; empty for the bucket.
        prefix: Prefix of the keys to tell of.
        on_change: See :data:`OnChange`.
        pauses: Pauses between streams.
    """

    def __init__(
        self,
        hub: Hub,
        folder: str,
        prefix: str,
        on_change: OnChange,
        *,
        pauses: Backoff = _PAUSES,
    ) -> None:
        self._hub = hub
        self._folder = folder
        self._begin = f"{folder}{prefix}"
        self._on_change = on_change
        self._pauses = pauses
        self._stop = Event()
        self._lock = Lock()
        self._socket: Any = None
        self._cursor = ""
        self._is_ready = False
        self._thread = Thread(target=self._run, name="deltachain-feed", daemon=True)
        if not started(self._thread):
            self._stop.set()

    @property
    @override
    def is_live(self) -> bool:
        return self._is_ready and not self._stop.is_set()

    @override
    def close(self) -> None:
        with self._lock:
            self._stop.set()
            self._wake()
        if self._thread is not current_thread() and self._thread.is_alive():
            self._thread.join(_CLOSE_S)  # a thread that connects ends once it has

    def _wake(self) -> None:
        """Interrupt a read: a socket that is merely closed leaves its reader waiting."""
        if self._socket is not None:
            with suppress(OSError):
                # Of the plain socket: that of TLS would first drop what its reader uses.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _run(self) -> None:
        failures = 0
        while not self._stop.is_set():
            began = time.monotonic()
            wait_s = 0.0
            try:
                self._follow()
            except AbsentFeedError as exc:
                logger.info("%s: polling, as there is no feed: %s", self._hub.place.url, exc)
                break
            except RefusedCursorError:
                self._cursor = ""
            except Exception as exc:  # noqa: BLE001 - of one of two libraries, as in Hub._try
                wait_s = exc.wait_s if isinstance(exc, FeedUnavailableError) else 0.0
                logger.debug("the feed of %s ended: %r", self._hub.place.url, exc)
            self._is_ready = False
            failures = 0 if time.monotonic() - began >= _SETTLED_S else failures + 1
            if failures or not self._cursor:
                self._tell("")
            self._stop.wait(max(self._pauses.pause_s(failures), wait_s))
        self._is_ready = False

    def _follow(self) -> None:
        """Read one stream to its end."""
        resumes = bool(self._cursor)
        with open_stream(self._hub, {"cursor": self._cursor} if resumes else {}) as response:
            self._hold(response)
            try:
                for event in parse_events(self._pieces(response)):
                    if self._stop.is_set() or not self._take(event, resumes=resumes):
                        return
            finally:
                self._hold(None)

    def _take(self, event: FeedEvent, *, resumes: bool) -> bool:
        """Act on an event; return whether the stream goes on."""
        self._cursor = "" if event.name == "reset" else event.cursor or self._cursor
        if event.name == "ready" and not self._is_ready:
            self._is_ready = True
            if not resumes:
                self._tell("")
        for path in event.paths:
            if path.startswith(self._begin):
                self._tell(path.removeprefix(self._folder))
        return event.name in ("ready", "changes")

    def _pieces(self, response: Any) -> Any:  # noqa: ANN401 - of httpx or httpx2
        """Yield the bytes of a stream as they arrive.

        Raises:
            FloodError: They are too many.
        """
        began, nbytes = time.monotonic(), 0
        for piece in response.iter_raw():
            nbytes += len(piece)
            if nbytes > _BURST + _RATE * (time.monotonic() - began):
                raise FloodError(f"{nbytes} bytes")
            yield piece

    def _hold(self, response: Any) -> None:  # noqa: ANN401
        """Keep the socket of a stream, for ``close``."""
        with self._lock:
            network = response.extensions.get("network_stream") if response is not None else None
            self._socket = network.get_extra_info("socket") if network is not None else None
            if self._stop.is_set():
                self._wake()

    def _tell(self, key: str) -> None:
        if not self._stop.is_set():
            self._on_change(key)
