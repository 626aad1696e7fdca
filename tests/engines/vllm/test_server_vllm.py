"""What only a vLLM server has: its backend, workers that are led from beside, packed linears."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.replica import Replica, error_of, serving
from tests.engines.serving import ROOT
from tests.engines.trainer import Trainer

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    with Trainer(tmp_path) as trainer:
        yield trainer


def beside(replica: Replica) -> tuple[list[str], dict[str, str]]:
    trainer, server = replica.trainer, replica.server
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "DELTACHAIN_URL": trainer.url,
        "DELTACHAIN_BASE": str(trainer.base),
        "DELTACHAIN_SPOOL": str(server.spool),
    }
    return [sys.executable, "-m", "deltachain_vllm", str(server.client.base_url)], environment


def eventually(check: Callable[[], object], within_s: float = 120) -> None:
    deadline = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_nobody_else_can_write_through_the_backend(trainer: Trainer, tmp_path: Path) -> None:
    with serving(trainer, tmp_path) as replica:
        client = replica.server.client
        assert client.post("/start_weight_update").status_code == 200
        orders = {"update_info": {"ticket": 10_000, "version": 7}}
        assert client.post("/update_weights", json=orders).status_code == 200
        assert client.post("/finish_weight_update").status_code == 200
        assert replica.holds(0)


def test_the_servers_own_metrics_have_the_replicas_figures(
    trainer: Trainer, tmp_path: Path
) -> None:
    with serving(trainer, tmp_path) as replica:
        shown = replica.server.client.get("/metrics").text
        status = replica.server.client.get("/v1/deltachain/status").json()
    assert "\ndeltachain_version 0.0\n" in shown
    assert "\ndeltachain_ready 1.0\n" in shown
    assert f'engine="{status["engine"]}"' in shown
    assert "vllm:" in shown
    assert status["engine"].startswith("vllm/")


def test_an_update_session_of_somebody_else_changes_nothing(
    trainer: Trainer, tmp_path: Path
) -> None:
    with serving(trainer, tmp_path, 2) as replica:
        server = replica.server
        server.update(trainer.step())
        trainer.step()
        assert server.client.post("/start_weight_update").status_code == 200
        error = error_of(server.post("update"), 409)
        assert error["type"] == "PartialApplyError"
        assert "somebody else has opened an update session" in error["message"]
        assert "finish_weight_update" in error["hint"]
        assert not server.status()["poisoned"]
        assert replica.holds(1)
        assert replica.serves(1)
        assert server.client.post("/finish_weight_update").status_code == 200
        server.update()
        assert replica.holds(2)


def test_the_worker_extension_alone_is_enough(trainer: Trainer, tmp_path: Path) -> None:
    with serving(trainer, tmp_path, bare=True) as replica:
        command, environment = beside(replica)
        for version in (1, 2):
            assert trainer.step() == version
            done = subprocess.run(
                [*command, "--version", str(version)],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=240,
            )
            assert (done.returncode, done.stdout) == (0, f"version {version}\n"), done.stderr
            assert replica.server.named() == str(version)
            assert replica.goes_on_as(version)


def test_a_second_leader_takes_over_and_the_first_stands_back(
    trainer: Trainer, tmp_path: Path
) -> None:
    with serving(trainer, tmp_path, 2) as replica:
        server = replica.server
        server.update(trainer.step())
        trainer.step()
        server.halt()  # as a leader that was killed inside a swap leaves it
        assert server.paused()
        command, environment = beside(replica)
        done = subprocess.run(
            [*command, "--version", "2"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert (done.returncode, done.stdout) == (0, "version 2\n"), done.stderr
        trainer.step()
        for path in ("update", "scrub"):
            error = error_of(server.post(path), 409)
            assert error["type"] == "LeaderReplacedError"
            assert "another leader has attached this rank since" in error["message"]
        assert server.named() == "2"
        assert not server.paused()
        assert not server.status()["poisoned"]
        assert server.generate([5, 6, 7], 4).spans == ((0, 4, "2"),)


def test_a_server_that_is_led_from_beside_serves_nothing_unproven(
    trainer: Trainer, tmp_path: Path
) -> None:
    with serving(trainer, tmp_path) as replica:
        server = replica.server
        command, environment = beside(replica)
        environment["DELTACHAIN_POLL_S"] = "0.2"
        leader = subprocess.Popen(command, env=environment)
        try:
            trainer.step()
            eventually(lambda: server.named() == "1")
            payload = replica.payload(1)
            kept = payload.read_bytes()
            payload.unlink()
            server.reset()
            trainer.step()
            eventually(server.paused)
            payload.write_bytes(kept)
            eventually(lambda: not server.paused())
            eventually(lambda: server.named() == "2")
            assert replica.has(trainer.pulled(2))
            assert replica.generates_with(2)
        finally:
            leader.terminate()
            assert leader.wait(60) == 0


@pytest.mark.parametrize("tp", [1, 2])
def test_an_engine_that_fails_to_load_is_taken_back(
    trainer: Trainer, tmp_path: Path, tp: int
) -> None:
    """Stock linears: packed by the kernels, so that whole layers are loaded and packed again."""
    with serving(trainer, tmp_path, tp, plain=False) as replica:
        assert "reloaded" in replica.server.status()["classes"]
        replica.server.update(trainer.step())
        assert replica.goes_on_as(1)
        trainer.step()
        replica.strike("load", nth=5)
        error = error_of(replica.server.post("update"), 409)
        assert (error["type"], replica.is_struck()) == ("PartialApplyError", True)
        assert replica.server.status()["version"] == 1
        assert replica.goes_on_as(1)
        replica.strike("load", nth=5, lasting=True)
        assert error_of(replica.server.post("update"), 409)["type"] == "PoisonedError"
        assert replica.stands_still()
        replica.strikes.unlink()
        assert replica.server.update()["version"] == 2
        assert replica.goes_on_as(2)


def test_a_sleeping_replica_is_not_ready_and_is_proven_as_it_wakes(
    trainer: Trainer, tmp_path: Path
) -> None:
    """A CPU has nothing to release, so that what is lost in its sleep is overwritten by hand."""
    with serving(trainer, tmp_path) as replica:
        server = replica.server
        server.update(trainer.step())
        assert server.client.post("/sleep?level=2").status_code == 200
        answer = server.get("ready")
        assert (answer.status_code, answer.json()["reason"][:6]) == (503, "asleep")
        trainer.step()
        refused = error_of(server.post("update"), 409)
        assert "released its weights" in refused["message"]
        server.reset()
        assert server.client.post("/wake_up").status_code == 200
        assert server.get("ready").status_code == 200
        server.update()
        assert replica.holds(2)
        assert replica.serves(2)
