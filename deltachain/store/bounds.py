"""Sockets that end with the call they are read and written for, however slow the other end is.

The timeout of a socket begins anew with every byte: a server that sends one a second holds a reader
for hours. So what is left of the call is looked at before each read and each write.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from deltachain.retry import Deadline
from deltachain.store.base import MAX_DOCUMENT

_LEAST_S: Final = 0.5
"""Seconds that every request has: the last one of a call begins when its time is over."""


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
    """Bound what sockets do for this thread meanwhile, and the answers that begin meanwhile.

    Args:
        deadline: When they end.
        nbytes: Bytes of the object that an answer brings; it may be as long as a document beyond.
    """
    token = _bound.set(_Bound(deadline, nbytes + MAX_DOCUMENT, time.monotonic() + _LEAST_S))
    try:
        yield
    finally:
        _bound.reset(token)


class BoundedSocket:
    """A connected socket as ``http.client`` uses it; all that it does not bound is the socket's."""

    def __init__(self, sock: Any) -> None:  # noqa: ANN401 - of TCP, of TLS, or of TLS inside TLS
        self._sock = sock
        self._timeout_s: float | None = sock.gettimeout()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """What it does not bound."""
        return getattr(self._sock, name)

    def settimeout(self, timeout_s: float | None) -> None:
        """Set how long one read or write may take where more is left of the call."""
        self._timeout_s = timeout_s
        self._sock.settimeout(timeout_s)

    def sendall(self, data: Any, flags: int = 0) -> None:  # noqa: ANN401 - any buffer
        """Send all of some bytes.

        Raises:
            TimeoutError: They did not leave in time.
        """
        self._sock.settimeout(_left_s(_bound.get(), self._timeout_s))
        self._sock.sendall(data, flags)

    def makefile(
        self, mode: str = "r", buffering: int | None = None, **_: object
    ) -> io.RawIOBase | io.BufferedReader:
        """What is received, as a file. It belongs to the call that is under way now."""
        if mode != "rb":
            raise ValueError(f"mode {mode!r}: only rb is bounded")
        raw = _Received(self._sock, _bound.get(), self._timeout_s)
        return raw if buffering == 0 else io.BufferedReader(raw)


class _Received(io.RawIOBase):
    """What one socket receives for one call."""

    def __init__(self, sock: Any, bound: _Bound | None, timeout_s: float | None) -> None:  # noqa: ANN401
        super().__init__()
        self._sock = sock
        # Keeps the socket open while it is read, though its connection may be closed already.
        self._raw: io.RawIOBase = sock.makefile("rb", buffering=0)
        self._bound = bound
        self._timeout_s = timeout_s
        self._nbytes = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def fileno(self) -> int:
        """That of the socket."""
        return self._raw.fileno()

    def readinto(self, buffer: Any, /) -> int | None:  # noqa: ANN401 - any writable buffer
        """Receive some bytes, 0 at the end.

        Raises:
            TimeoutError: The call is over.
            ConnectionError: The answer is longer than any that was asked for.
        """
        self._sock.settimeout(_left_s(self._bound, self._timeout_s))
        nbytes = self._raw.readinto(buffer)
        self._nbytes += nbytes or 0
        if self._bound is not None and self._nbytes > self._bound.nbytes:
            raise ConnectionError(f"the answer has more than {self._bound.nbytes} bytes")
        return nbytes

    def close(self) -> None:
        """Leave the rest."""
        self._raw.close()
        super().close()


def _left_s(bound: _Bound | None, timeout_s: float | None) -> float | None:
    """The timeout of one read or write.

    Raises:
        TimeoutError: Nothing is left.
    """
    if bound is None:
        return timeout_s
    left_s = bound.left_s
    if left_s <= 0:
        raise TimeoutError("the time of the call is over")
    return left_s if timeout_s is None else min(left_s, timeout_s)
