"""Connections that were idle: a server closes them, sometimes while a request is on its way."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from deltachain.control.replica_client import KEEPALIVE_S, make_client

UVICORN_S = 5.0
"""Seconds after which uvicorn closes an idle connection, by default."""

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def serve(connection: socket.socket) -> None:
    """Answer, except to a request on a connection that was idle too long: close it instead.

    uvicorn does so if its timer ends before the request is read.
    """
    with connection:
        last = time.monotonic()
        while b"\r\n\r\n" in connection.recv(65536):
            if time.monotonic() - last > KEEPALIVE_S:
                return
            connection.sendall(ANSWER)
            last = time.monotonic()


@pytest.fixture
def port() -> Iterator[int]:
    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=[connection], daemon=True).start()

    with socket.create_server(("0.0.0.0", 0)) as listener:  # noqa: S104 - of all loopback addresses
        thread = threading.Thread(target=accept)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_no_request_is_sent_on_a_connection_that_the_server_may_close(port: int) -> None:
    assert KEEPALIVE_S < UVICORN_S / 2
    # The first is never asked for through a proxy, which is another transport.
    urls = [f"http://127.0.0.1:{port}", f"http://127.0.0.2:{port}"]
    with make_client() as client:
        for pause in (0.0, KEEPALIVE_S + 0.2):
            time.sleep(pause)
            assert [client.get(url).text for url in urls] == ["ok", "ok"]
