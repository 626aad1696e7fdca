"""A local TCP proxy that injects network faults between a client and a server.

::

    with Proxy(server.port) as proxy:
        store = open_store(url, {**server.options, "endpoint_url": proxy.endpoint})
        proxy.cut_after(1_000_000)

Settings apply to later requests, on open connections as well.
"""

import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Final, Self

_HOST: Final = "127.0.0.1"
_PIECE: Final = 16 << 10
_REQUEST: Final = re.compile(rb"[A-Z]+ /[^\r\n]* HTTP/1\.1\r\n")
_RESET: Final = struct.pack("ii", 1, 0)


class Proxy:
    """Forwards connections to a local port, with faults on request."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None
        self.port = 0
        self.received = self.dropped = self.cuts = self.answered = 0
        self.reset()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def endpoint(self) -> str:
        return f"http://{_HOST}:{self.port}"

    def delay(self, seconds: float) -> None:
        self._delay_s = seconds

    def throttle(self, bytes_per_s: float) -> None:
        self._speed = bytes_per_s

    def cut_after(self, nbytes: int, *, times: int = 1, reset: bool = False) -> None:
        with self._lock:
            self._cut_nbytes, self._cuts_left, self._cut_resets = nbytes, times, reset

    def drop_reply(self, method: str, *, times: int = 1) -> None:
        with self._lock:
            self._drop_method, self._drops_left = method.encode(), times

    def answer(self, status: str, *headers: str, body: bytes = b"", method: str = "") -> None:
        head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
        with self._lock:
            self._answer_method = method.encode()
            self._own_answer = "\r\n".join([*head, "", ""]).encode() + body

    def drip(self, pace_s: float) -> None:
        """Send responses byte by byte, with a pause after each."""
        self._pace_s = pace_s

    def refuse(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            _close(listener)
        self._close_all()

    def reset(self) -> None:
        with self._lock:
            self._delay_s = 0.0
            self._speed = 0.0
            self._cut_nbytes, self._cuts_left, self._cut_resets = 0, 0, False
            self._drop_method, self._drops_left = b"", 0
            self._answer_method, self._own_answer = b"", b""
            self._pace_s = 0.0
        if self._listener is None:
            self._listen()

    def stop(self) -> None:
        self.refuse()
        for thread in self._threads:
            thread.join()

    def _listen(self) -> None:
        listener = socket.create_server((_HOST, self.port), backlog=64)
        self.port = listener.getsockname()[1]
        self._listener = listener
        self._run(self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                self._run(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        with ExitStack() as stack:
            stack.callback(self._forget, client)
            try:
                server = socket.create_connection((_HOST, self._target))
            except OSError:
                return
            stack.callback(self._forget, server)
            with self._lock:
                self._open |= {client, server}
            if self._listener is None:
                return
            connection = _Connection()
            asking = threading.Thread(target=self._ask, args=(client, server, connection))
            asking.start()
            self._answer(server, client, connection)
            # Wakes the other thread; the following close decides between FIN and RST.
            with suppress(OSError):
                client.shutdown(socket.SHUT_RD)
            asking.join()

    def _ask(self, client: socket.socket, server: socket.socket, connection: "_Connection") -> None:
        with suppress(OSError):
            while piece := client.recv(_PIECE):
                if _REQUEST.match(piece):
                    connection.method, connection.nbytes = piece.split(b" ", 1)[0], 0
                    if self._answers_itself(client, connection.method):
                        break
                server.sendall(piece)
            server.shutdown(socket.SHUT_WR)

    def _answers_itself(self, client: socket.socket, method: bytes) -> bool:
        with self._lock:
            answer = self._own_answer if self._answer_method in (b"", method) else b""
            self.answered += bool(answer)
        if not answer:
            return False
        client.sendall(answer)
        client.shutdown(socket.SHUT_WR)
        while client.recv(_PIECE):
            pass  # an earlier close would discard the response
        return True

    def _answer(
        self, server: socket.socket, client: socket.socket, connection: "_Connection"
    ) -> None:
        with suppress(OSError):
            while piece := server.recv(_PIECE):
                # 100 Continue is not the final response.
                interim = piece.startswith(b"HTTP/1.1 100") and piece.endswith(b"\r\n\r\n")
                if not interim and self._drops(connection.method):
                    return
                left = self._cut(connection.nbytes, len(piece))
                if self._speed:
                    time.sleep(len(piece) / self._speed)
                time.sleep(self._delay_s)
                self._send(client, piece[:left])
                connection.nbytes += min(left, len(piece))
                with self._lock:
                    self.received += min(left, len(piece))
                if left < len(piece):
                    if self._cut_resets:
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    return

    def _send(self, client: socket.socket, piece: bytes) -> None:
        at = 0
        while self._pace_s and at < len(piece):
            client.sendall(piece[at : at + 1])
            time.sleep(self._pace_s)
            at += 1
        client.sendall(piece[at:])

    def _drops(self, method: bytes) -> bool:
        with self._lock:
            if not self._drops_left or method != self._drop_method:
                return False
            self._drops_left -= 1
            self.dropped += 1
            return True

    def _cut(self, before: int, nbytes: int) -> int:
        with self._lock:
            if not self._cuts_left or before + nbytes <= self._cut_nbytes:
                return nbytes
            self._cuts_left -= 1
            self.cuts += 1
            return max(0, self._cut_nbytes - before)

    def _run(self, target: Callable[[socket.socket], None], end: socket.socket) -> None:
        thread = threading.Thread(target=target, args=(end,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _forget(self, end: socket.socket) -> None:
        with self._lock:
            self._open.discard(end)
        end.close()

    def _close_all(self) -> None:
        with self._lock:
            ends = list(self._open)
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class _Connection:
    method = b""
    nbytes = 0


def _close(listener: socket.socket) -> None:
    # A shutdown wakes a thread in accept(); a close does not.
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()
