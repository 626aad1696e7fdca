"""The dashboard closes connections that last too long, and those that are too many."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import httpx
import uvicorn

from deltachain.dashboard.app import limited


async def app(scope: object, receive: object, send: object) -> None:
    del scope, receive
    assert callable(send)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


@contextmanager
def served(request_s: float = 60, most: int = 100) -> Iterator[int]:
    """Serve an app with these limits; yield its port."""
    listening = socket.create_server(("127.0.0.1", 0))
    http = limited(request_s=request_s, most=most)
    config = uvicorn.Config(app, http=http, log_level="critical", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def test_a_client_that_sends_a_byte_at_a_time_is_closed() -> None:
    with served(request_s=0.3) as port:
        begun = time.monotonic()
        with socket.create_connection(("127.0.0.1", port)) as slow, suppress(ConnectionError):
            slow.settimeout(0.05)
            slow.sendall(b"GET / HTTP/1.1\r\nX: ")
            while time.monotonic() < begun + 60:
                slow.sendall(b"y")
                with suppress(TimeoutError):
                    if not slow.recv(1):
                        break
        assert time.monotonic() < begun + 60
        assert httpx.get(f"http://127.0.0.1:{port}").text == "ok"


def test_a_connection_with_many_requests_stays_open() -> None:
    with served(request_s=2.0) as port, httpx.Client() as client:
        begun = time.monotonic()
        while time.monotonic() < begun + 4.5:
            assert client.get(f"http://127.0.0.1:{port}").text == "ok"


def test_the_oldest_connection_gives_its_place() -> None:
    with served(most=4) as port, ExitStack() as stack:
        address = ("127.0.0.1", port)
        held = [stack.enter_context(socket.create_connection(address)) for _ in range(8)]
        assert httpx.get(f"http://127.0.0.1:{port}").text == "ok"
        for one in held[:5]:
            one.settimeout(60)
            with suppress(ConnectionError):
                assert one.recv(1) == b""
