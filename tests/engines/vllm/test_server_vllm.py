"""What only a vLLM server has: its backend, its metrics, packed linears."""

from pathlib import Path

import pytest

from tests.engines.replica import error_of, serving
from tests.engines.serving import answers, start
from tests.engines.trainer import Trainer
from tests.engines.vllm.server import VllmServer


def test_a_server_of_phi_serves_what_it_serves_without_us(tmp_path: Path) -> None:
    """vLLM registers the bias of its head while it loads it: that is not there before."""
    with Trainer(tmp_path, family="phi") as trainer, Trainer(tmp_path / "other") as other:
        with start(trainer.base, tmp_path / "alone") as server:
            alone = answers(server, 8)
        lenient = {"DELTACHAIN_STRICT": "0"}
        folder = tmp_path / "refused"
        with start(trainer.base, folder, other.url, environment=lenient) as server:
            assert server.get("ready").status_code == 503
            assert answers(server, 8) == alone
        with serving(trainer, tmp_path, plain=False) as replica:
            assert "refused" not in replica.server.status()["classes"]
            assert answers(replica.server, 8) == alone
            replica.server.update(trainer.step())
            assert replica.goes_on_as(1)


pytestmark = [pytest.mark.engine, pytest.mark.slow]


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
        assert isinstance(server, VllmServer)
        server.sleep("2")
        answer = server.get("ready")
        assert (answer.status_code, answer.json()["reason"][:6]) == (503, "asleep")
        trainer.step()
        refused = error_of(server.post("update"), 409)
        assert "released its weights" in refused["message"]
        server.reset()
        server.wake()
        assert server.get("ready").status_code == 200
        server.update()
        assert replica.holds(2)
        assert replica.serves(2)
