"""A server whose engine was killed: it is not ready while its own health says so, or before."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

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


def test_a_replica_is_not_ready_once_its_engine_is_dead(tmp_path: Path) -> None:
    with replicas(tmp_path) as replica:
        server = replica.server
        assert replica.serves(0)
        process = server._process
        assert process is not None
        (victim,) = (
            one
            for one in psutil.Process(process.pid).children(recursive=True)
            if RANK in " ".join(one.cmdline())
        )
        os.kill(victim.pid, signal.SIGKILL)
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            threads = Path(f"/proc/{victim.pid}/task")
            while victim.status() != psutil.STATUS_ZOMBIE or len(list(threads.iterdir())) > 1:
                time.sleep(0.01)
        paths = (f"{server.prefix}/ready", f"{server.prefix}/readyz", "/readyz/deltachain")
        asked = 0
        while server.alive and asked < ENOUGH:
            with suppress(httpx.TransportError):
                if is_unhealthy(server):
                    assert {server.client.get(path).status_code for path in paths} == {503}
                    asked += 1
        assert asked
