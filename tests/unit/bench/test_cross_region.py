import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from deltachain.errors import ConfigError
from tests.bench.cross_region import network
from tests.bench.cross_region.__main__ import main
from tests.bench.cross_region.network import DelayProxy

pytestmark = pytest.mark.full


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
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


def why_not() -> str:
    """What keeps this machine from running it; empty if nothing does."""
    try:
        network.check_host()
    except ConfigError as exc:
        return str(exc)
    name = f"deltachain-probe-{os.getpid()}"
    added = ip("netns", "add", name)
    if added.returncode:
        return f"ip netns add: {added.stderr.strip()}"
    ip("netns", "del", name)
    return ""


def ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("ip") or "ip"
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_every_way_brings_every_bit_to_every_replica(capsys: pytest.CaptureFixture[str]) -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    before = ip("netns", "list").stdout.split()
    assert main(["--parameters", "1", "--versions", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = found["rows"]
    assert len(rows) == 2 * len(found["samples"]) == 8
    assert all(row["mismatches"] == 0 for row in rows)
    # A look and a get: a round trip each, and half.
    assert all(row["median_s"] > 0.1 for row in rows if row["replica"] == "a")
    assert all(row["received_nbytes"] > 10_000 for row in rows)
    assert {*ip("netns", "list").stdout.split()} <= {*before}
