"""Servers whose ranks hold other tensors: stages of a pipeline, and shards of experts."""

from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from tests.engines import strikes
from tests.engines.replica import Replica, error_of, serving
from tests.engines.serving import ENGINE
from tests.engines.trainer import Trainer

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# Eager engines of vLLM on a CPU do not warm up, in which a stage makes what it receives into.
COMPILED: Final = ("--no-enforce-eager", "--compilation-config", '{"mode": 3, "backend": "eager"}')

STAGES: Final[dict[str, Any]] = {
    "vllm": {"arguments": ("--pipeline-parallel-size", "2", *COMPILED)},
    "sglang": {
        "arguments": ("--pp-size", "2"),
        "environment": {"DELTACHAIN_PAUSE": "abort"},
    },
}

EXPERTS: Final[dict[str, Any]] = {
    "vllm": {"arguments": ("--enable-expert-parallel",)},
    "sglang": {"arguments": ("--ep-size", "2")},
}


def test_stages_are_updated_as_one_and_start_again_after_a_kill(tmp_path: Path) -> None:
    with Trainer(tmp_path) as trainer:
        with serving(trainer, tmp_path, **STAGES[ENGINE]) as replica:
            follow(replica)
            trainer.step()
            strike(replica, kill=True)
            with suppress(httpx.TransportError):
                assert replica.server.post("update").status_code != 200
            assert replica.is_struck()
            process = replica.server._process
            assert process is not None
            with suppress(psutil.NoSuchProcess):
                psutil.Process(process.pid).wait(120)
        with serving(trainer, tmp_path, base=trainer.pulled(1), **STAGES[ENGINE]) as replica:
            assert len(replica.server.status()["ranks"]) == 2
            assert replica.goes_on_as(3)


def test_shards_of_experts_are_updated_as_one(tmp_path: Path) -> None:
    with (
        Trainer(tmp_path, family="qwen3_moe") as trainer,
        serving(trainer, tmp_path, 2, **EXPERTS[ENGINE]) as replica,
    ):
        follow(replica)


def follow(replica: Replica) -> None:
    """Update, fail on one rank alone, go back, and hold version 2 in the end."""
    server, trainer = replica.server, replica.trainer
    server.update(trainer.step())
    trainer.step()
    strike(replica)
    error = error_of(server.post("update"), 409)
    assert (error["type"], replica.is_struck()) == ("PartialApplyError", True)
    assert replica.goes_on_as(1)
    assert server.update()["version"] == 2
    assert server.post("rollback", version=1).status_code == 200
    assert replica.goes_on_as(1)
    assert server.post("scrub").status_code == 200
    server.post("release")
    assert server.update()["version"] == 2
    assert replica.goes_on_as(2)


def strike(replica: Replica, **how: Any) -> None:
    strikes.order(replica.strikes, "write", rank=1, **how)
