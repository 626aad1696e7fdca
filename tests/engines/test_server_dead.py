"""Servers that are started again, and those with an engine that was killed or hangs."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from deltachain.chain.chain import Chain
from deltachain.presence.record import PresenceRecord, parse_record
from deltachain.publish.revert import revert
from deltachain.replica.leader import MAX_SILENCE_S
from deltachain.store import open_store
from tests.engines.replica import replicas, serving
from tests.engines.serving import ENGINE, Server
from tests.engines.trainer import Trainer


def go_back(url: str, version: int) -> int:
    chain = Chain.open(open_store(url))
    done = revert(chain, chain.read(version))
    assert done.committed is not None
    assert done.committed.state == chain.read(version).state
    return done.committed.version


def test_a_running_server_is_present_and_reverted_and_so_is_its_successor(tmp_path: Path) -> None:
    board = tmp_path / "replicas"
    variables = {"DELTACHAIN_PRESENCE_URL": str(board)}
    with Trainer(tmp_path) as trainer:
        for _ in range(3):
            trainer.step()
        with serving(trainer, tmp_path, environment=variables) as replica:
            assert replica.holds(3)
            (file,) = board.glob("*.json")
            record, asked = _ready(file), replica.server.status()
            assert record.status.version == asked["version"] == 3
            assert record.status.chain == asked["chain"]
            assert record.status.engine == asked["engine"]
            assert record.status.engine.startswith(f"{ENGINE}/")
            running = go_back(trainer.url, 1)
            assert replica.server.update()["version"] == running == 4
            assert replica.holds(running)
            assert replica.has(trainer.pulled(1))
            assert replica.serves(running)
            replica.server.stop()
            assert not file.exists(), replica.server.log()[-3000:]
        restarted = go_back(trainer.url, 2)  # nobody is there to be told
        with serving(trainer, tmp_path, base=trainer.pulled(restarted)) as replica:
            status = replica.server.status()
            assert status["version"] == restarted == 5
            assert status["last"] is None, "it begins where the chain ends"
            assert replica.holds(restarted)
            assert replica.has(trainer.pulled(2))
            assert replica.serves(restarted)


def _ready(file: Path) -> PresenceRecord:
    until = time.monotonic() + 60
    while not (record := parse_record(file.read_bytes(), file.name)).status.ready:
        assert time.monotonic() < until
        time.sleep(0.1)
    return record


pytestmark = pytest.mark.engine

RANK = {"vllm": "EngineCore", "sglang": "sglang::scheduler"}.get(ENGINE, "")
"""Part of the title of a process without which nothing is generated."""

ENOUGH = 100
"""Answers that are seen, where the server does not end by itself."""


def is_unhealthy(server: Server) -> bool:
    """Whether the engine's own health says so; SGLang's first waits for an answer of the dead."""
    return ENGINE == "sglang" or server.client.get("/health").status_code != 200


def engine_of(server: Server) -> psutil.Process:
    assert server._process is not None
    (found,) = (
        one
        for one in psutil.Process(server._process.pid).children(recursive=True)
        if RANK in " ".join(one.cmdline())
    )
    return found


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
                    codes = server.readiness()
                    assert codes <= {503}
                    answers += len(codes)


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
            assert server.readiness() == {503}
        finally:
            victim.resume()
        server.wait_for(lambda status: status["ready"])
        assert replica.serves(0)
