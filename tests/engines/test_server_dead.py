"""Servers whose engine was killed, hangs, or was paused by others: they are not ready."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from deltachain.replica.engine_watch import MAX_SILENCE_S
from tests.engines.replica import replicas
from tests.engines.serving import ENGINE, Server

pytestmark = pytest.mark.engine

RANK = {"vllm": "EngineCore", "sglang": "sglang::scheduler"}.get(ENGINE, "")
"""Part of the title of a process without which nothing is generated."""

ENOUGH = 100
"""Answers that are seen, where the server does not end by itself."""


def is_unhealthy(server: Server) -> bool:
    """Whether the engine's own health says so; SGLang's first waits for an answer of the dead."""
    return ENGINE == "sglang" or server.client.get("/health").status_code != 200


def engine_of(server: Server) -> psutil.Process:
    """The process without which nothing is generated."""
    assert server._process is not None
    (found,) = (
        one
        for one in psutil.Process(server._process.pid).children(recursive=True)
        if RANK in " ".join(one.cmdline())
    )
    return found


def readiness(server: Server) -> set[int]:
    """Return the status codes of all readiness routes; a refused connection has none."""
    codes = set()
    for path in (f"{server.prefix}/ready", f"{server.prefix}/readyz", "/readyz/deltachain"):
        with suppress(httpx.TransportError):
            codes.add(server.client.get(path).status_code)
    return codes


def test_a_replica_is_not_ready_once_its_engine_is_dead(tmp_path: Path) -> None:
    with replicas(tmp_path) as replica:
        server = replica.server
        assert replica.serves(0)
        victim = engine_of(server)
        os.kill(victim.pid, signal.SIGKILL)
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            threads = Path(f"/proc/{victim.pid}/task")
            while victim.status() != psutil.STATUS_ZOMBIE or len(list(threads.iterdir())) > 1:
                time.sleep(0.01)
        answers = 0
        while server.alive and answers < ENOUGH:  # SGLang's often ends before it answers anybody
            with suppress(httpx.TransportError):
                if is_unhealthy(server):
                    codes = readiness(server)
                    assert codes <= {503}
                    answers += len(codes)


def test_a_replica_is_not_ready_while_another_client_has_paused_it(tmp_path: Path) -> None:
    with replicas(tmp_path) as replica:
        server = replica.server
        assert replica.serves(0)
        server.halt()
        found = server.wait_for(lambda status: not status["ready"])
        assert (found["reason"], found["paused"]) == ("paused by another client", True)
        assert readiness(server) == {503}
        server.go_on()
        server.wait_for(lambda status: status["ready"])
        assert replica.serves(0)


@pytest.mark.slow
def test_a_replica_is_not_ready_while_its_engine_hangs(tmp_path: Path) -> None:
    with replicas(tmp_path) as replica:
        server = replica.server
        assert replica.serves(0)
        victim = engine_of(server)
        victim.suspend()
        try:
            found = server.wait_for(lambda status: not status["ready"], 3 * MAX_SILENCE_S)
            assert found["fault"].startswith("the engine has not answered for")
            assert readiness(server) == {503}
        finally:
            victim.resume()
        server.wait_for(lambda status: status["ready"])
        assert replica.serves(0)
