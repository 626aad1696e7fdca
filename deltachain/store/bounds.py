"""Sockets whose reads and writes end by the deadline of a call, however slow the peer is.

The timeout of a socket restarts with every byte: a server that sends one byte a second could block
a reader for hours. The remaining time of the call is therefore checked before each read and write.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from typing_extensions import override

from deltachain.retry import Deadline
from deltachain.store.base import MAX_DOCUMENT

_LEAST_S: Final = 0.5
"""Least time for a request, in seconds: the last request of a call begins after its deadline."""


@dataclass(frozen=True, slots=True)
class _Bound:
    deadline: Deadline
    nbytes: int
    least_at: float

    @property
    def left_s(self) -> float:
        return max(self.deadline.left_s, self.least_at - time.monotonic())


_bound: Final[ContextVar[_Bound | None]] = ContextVar("deltachain_bound", default=None)


@contextmanager
def bounded(deadline: Deadline, nbytes: int = 0) -> Iterator[None]:
    """Apply a deadline to socket operations of this thread, and to responses begun in the block.

    Args:
        deadline: Deadline of the operations.
        nbytes: Size of the object in the response, in bytes; the response may exceed it by the size
            of a document.
    """
    token = _bound.set(_Bound(deadline, nbytes + MAX_DOCUMENT, time.monotonic() + _LEAST_S))
    try:
        yield
    finally:
        _bound.reset(token)


class BoundedSocket:
    """A connected socket for ``http.client``; operations without a bound pass to the socket."""

    def __init__(self, sock: Any) -> None:  # noqa: ANN401 - of TCP, of TLS, or of TLS inside TLS
        self._sock = sock
        self._timeout_s: float | None = sock.gettimeout()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Return an attribute of the wrapped socket."""
        return getattr(self._sock, name)

    def settimeout(self, timeout_s: float | None) -> None:
        """Set the timeout of one read or write, in seconds, if the call has more time left."""
        self._timeout_s = timeout_s
        self._sock.settimeout(timeout_s)

    def sendall(self, data: Any, flags: int = 0) -> None:  # noqa: ANN401 - any buffer
        """Send all bytes of a buffer.

        Raises:
            TimeoutError: The call ended first.
        """
        self._sock.settimeout(_left_s(_bound.get(), self._timeout_s))
        self._sock.sendall(data, flags)

    def makefile(
        self, mode: str = "r", buffering: int | None = None, **_: object
    ) -> io.RawIOBase | io.BufferedReader:
        """Return the received bytes as a file, bound to the current call."""
        if mode != "rb":
            raise ValueError(f"mode {mode!r}: only rb is bounded")
        raw = _Received(self._sock, _bound.get(), self._timeout_s)
        return raw if buffering == 0 else io.BufferedReader(raw)


class _Received(io.RawIOBase):
    """The bytes that one socket receives during one call."""

    def __init__(self, sock: Any, bound: _Bound | None, timeout_s: float | None) -> None:  # noqa: ANN401
        super().__init__()
        self._sock = sock
        # Keeps the socket open for reading, even if its connection is closed already.
        self._raw: io.RawIOBase = sock.makefile("rb", buffering=0)
        self._bound = bound
        self._timeout_s = timeout_s
        self._nbytes = 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def fileno(self) -> int:
        return self._raw.fileno()

    def readinto(self, buffer: Any, /) -> int | None:  # noqa: ANN401 - any writable buffer
        """Receive bytes into ``buffer``; return 0 at the end.

        Raises:
            TimeoutError: The call ended.
            ConnectionError: The response is longer than the request allows.
        """
        self._sock.settimeout(_left_s(self._bound, self._timeout_s))
        nbytes = self._raw.readinto(buffer)
        self._nbytes += nbytes or 0
        if self._bound is not None and self._nbytes > self._bound.nbytes:
            raise ConnectionError(f"the answer has more than {self._bound.nbytes} bytes")
        return nbytes

    def close(self) -> None:
        """Discard the remaining bytes."""
        self._raw.close()
        super().close()


def _left_s(bound: _Bound | None, timeout_s: float | None) -> float | None:
    """Return the timeout of one read or write, in seconds.

    Raises:
        TimeoutError: No time is left.
    """
    if bound is None:
        return timeout_s
    left_s = bound.left_s
    if left_s <= 0:
        raise TimeoutError("the time of the call is over")
    return left_s if timeout_s is None else min(left_s, timeout_s)
