"""A TCP proxy that makes the way to a server longer, not narrower.

Kernels without ``netem`` can limit rates, but not delay packets. So what a client and a server say
to each other is held back here, each piece for the time that one way takes, while further pieces
come in. A connection's first bytes wait for a round trip more, which is what its handshake takes.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from contextlib import ExitStack, suppress
from typing import Final, Self, TypeAlias

_PIECE: Final = 64 << 10
_HELD: Final = 512

Held: TypeAlias = "queue.Queue[tuple[float, bytes]]"


class DelayProxy:
    def __init__(self, target: tuple[str, int], *, delay_s: float, host: str = "127.0.0.1") -> None:
        self._target = target
        self._delay_s = delay_s
        self._listener = socket.create_server((host, 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._serving: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._stopped = False
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            ends = [self._listener, *self._open]
        for end in ends:
            with suppress(OSError):  # wakes who waits for it
                end.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join()
        for serving in self._serving:
            serving.join()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                serving = threading.Thread(target=self._serve, args=(client,), daemon=True)
                self._serving.append(serving)
                serving.start()

    def _serve(self, client: socket.socket) -> None:
        with ExitStack() as stack:
            stack.callback(self._forget, client)
            if not self._keep(client):
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:
                return
            stack.callback(self._forget, server)
            if not self._keep(server):
                return
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            handshake_s = 2 * self._delay_s
            ways = [
                threading.Thread(target=self._carry, args=args, daemon=True)
                for args in ((client, server, handshake_s), (server, client, 0.0))
            ]
            for way in ways:
                way.start()
            for way in ways:
                way.join()

    def _carry(self, source: socket.socket, sink: socket.socket, first_s: float) -> None:
        held: Held = queue.Queue(_HELD)
        sending = threading.Thread(target=_send, args=(held, sink), daemon=True)
        sending.start()
        ready = time.monotonic() + self._delay_s + first_s
        piece = b"first"
        while piece:
            try:
                piece = source.recv(_PIECE)
            except OSError:
                piece = b""
            ready = max(ready, time.monotonic() + self._delay_s)
            held.put((ready, piece))
        sending.join()

    def _keep(self, end: socket.socket) -> bool:
        with self._lock:
            if not self._stopped:
                self._open.add(end)
            return not self._stopped

    def _forget(self, end: socket.socket) -> None:
        with self._lock:
            self._open.discard(end)
        end.close()


def _send(held: Held, sink: socket.socket) -> None:
    broken = False
    while True:
        ready, piece = held.get()
        if not piece:
            break
        if not broken:  # else only taken, so that nobody waits for room
            time.sleep(max(0.0, ready - time.monotonic()))
            try:
                sink.sendall(piece)
            except OSError:
                broken = True
    time.sleep(max(0.0, ready - time.monotonic()))
    with suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR if broken else socket.SHUT_WR)
