from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from tests.bench.cross_region.delay import DelayProxy
from tests.bench.cross_region.network import CrossRegionError
from tests.bench.cross_region.plan import Command, NetworkPlan
from tests.bench.cross_region.processes import Process


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """A server that treats each connection in turn so, and closes it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                end, _ = listener.accept()
            except OSError:
                return
            with end:
                answer(end)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def echo(end: socket.socket) -> None:
    while piece := end.recv(1 << 16):
        end.sendall(piece)


def test_a_round_trip_takes_its_time_and_the_first_one_a_handshake_more() -> None:
    took = []
    with (
        answering(echo) as target,
        DelayProxy(target, delay_s=0.05) as proxy,
        socket.create_connection(("127.0.0.1", proxy.port)) as client,
    ):
        for _ in range(3):
            start = time.monotonic()
            client.sendall(b"hello")
            assert client.recv(16) == b"hello"
            took.append(time.monotonic() - start)
    assert took[0] >= 0.2
    assert all(seconds >= 0.1 for seconds in took)
    assert min(took[1:]) < 0.2


def test_delay_does_not_limit_how_much_comes() -> None:
    data = np.random.default_rng(0).bytes(24 << 20)
    received = bytearray()
    with (
        answering(lambda end: end.sendall(data)) as target,
        DelayProxy(target, delay_s=0.1) as proxy,
        socket.create_connection(("127.0.0.1", proxy.port)) as client,
    ):
        start = time.monotonic()
        while piece := client.recv(1 << 20):
            received += piece
        took = time.monotonic() - start
    assert received == data
    assert took >= 0.1
    assert took < 8  # one delay for each of its 384 pieces or more would be 38 s


def test_the_end_of_a_request_goes_through_before_its_answer() -> None:
    def count(end: socket.socket) -> None:
        total = 0
        while piece := end.recv(1 << 16):
            total += len(piece)
        end.sendall(str(total).encode())

    with (
        answering(count) as target,
        DelayProxy(target, delay_s=0.01) as proxy,
        socket.create_connection(("127.0.0.1", proxy.port)) as client,
    ):
        client.sendall(bytes(100_000))
        client.shutdown(socket.SHUT_WR)
        assert client.recv(16) == b"100000"


def test_no_server_is_the_end_of_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        target = gone.getsockname()
    with (
        DelayProxy(target, delay_s=0.01) as proxy,
        socket.create_connection(("127.0.0.1", proxy.port)) as client,
    ):
        assert client.recv(16) == b""


class Here(NetworkPlan):
    """A network of this namespace alone."""

    def inside(self, place: str, command: Command) -> Command:  # noqa: ARG002
        return command


def test_a_process_does_its_role_and_ends_with_its_orders(tmp_path: Path) -> None:
    with answering(echo) as (host, port):
        order = {"endpoint": f"http://{host}:{port}", "delay_s": 0.01}
        with Process(Here("x", ()), "here", "proxy", order, log=tmp_path / "log") as proxy:
            delayed = urlsplit(proxy.answer(60)["endpoint"])
            with socket.create_connection((str(delayed.hostname), delayed.port or 0)) as client:
                client.sendall(b"hello")
                assert client.recv(16) == b"hello"


def test_a_process_that_fails_is_named_with_what_it_said(tmp_path: Path) -> None:
    plan = Here("x", ())
    with Process(plan, "here", "proxy", {"delay_s": 0}, log=tmp_path / "log") as proxy:
        with pytest.raises(CrossRegionError, match="the proxy at here ended") as caught:
            proxy.answer(60)
        assert "KeyError: 'endpoint'" in str(caught.value)
