"""Feed of one bucket: a thread that reads the Hub's stream of changes, and connects again."""

from __future__ import annotations

import logging
import socket
import time
from contextlib import suppress
from threading import Event, Lock, Thread, current_thread
from typing import Any, Final

from typing_extensions import override

from deltachain.retry import Backoff
from deltachain.store.feed import Feed, OnChange
from deltachain.store.hf.api import Hub
from deltachain.store.hf.events import FeedEvent, parse_events
from deltachain.store.hf.stream import (
    AbsentFeedError,
    FeedUnavailableError,
    RefusedCursorError,
    open_stream,
)
from deltachain.threads import started

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
