"""An engine over two nodes that share nothing but the store: each fetches for itself."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from deltachain.replica.leader import EVERY_S, MAX_SILENCE_S
from examples.demo.online.processes import free_port
from tests.engines.replica import Replica, error_of, serving
from tests.engines.serving import ENGINE, STOP_S, Options, Server, server_class
from tests.engines.trainer import Trainer

pytestmark = pytest.mark.engine

ADDRESS = {"vllm": ("--master-addr", "127.0.0.1", "--master-port")}.get(
    ENGINE, ("--dist-init-addr",)
)
HEADLESS = {"vllm": ("--headless",)}.get(ENGINE, ())


def rendezvous() -> tuple[str, ...]:
    port = free_port()
    return "--nnodes", "2", *ADDRESS, str(port) if ENGINE == "vllm" else f"127.0.0.1:{port}"


SILENT_S = EVERY_S + MAX_SILENCE_S + STOP_S
"""Seconds after which a replica is not ready with a rank that has ended on another node."""


@contextmanager
def second_node(
    trainer: Trainer, folder: Path, arguments: tuple[str, ...], tp: int = 2
) -> Iterator[psutil.Process]:
    """Run the second node: the command of the first one, with its own number and spool."""
    options = Options(tp=tp, plain=True, dev=True, strikes=folder / "strike", arguments=arguments)
    node: Server = server_class()(trainer.base, folder / "second", trainer.url, options)
    with node.log_path.open("ab") as log:
        process = subprocess.Popen(
            node._command, stdout=log, stderr=log, env=node._environment, start_new_session=True
        )
    try:
        yield psutil.Process(process.pid)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def two_nodes(
    trainer: Trainer, folder: Path, **options: Any
) -> Iterator[tuple[Replica, psutil.Process]]:
    arguments = rendezvous()
    first = (*arguments, "--node-rank", "0")
    second = (*arguments, "--node-rank", "1", *HEADLESS)
    with (
        second_node(trainer, folder, second) as node,
        serving(trainer, folder, 2, arguments=first, **options) as replica,
    ):
        yield replica, node


def test_each_node_fetches_for_itself(trainer: Trainer, tmp_path: Path) -> None:
    with two_nodes(trainer, tmp_path) as (replica, _):
        for _ in range(3):
            replica.server.update(trainer.step())
            assert replica.holds(trainer.head)
            assert replica.serves(trainer.head)
        assert "rank 1 fetches for them" in replica.server.log()
        replica.server.post("rollback")
        assert replica.holds(2)
        replica.server.post("release")
        replica.strike("stage")
        assert "rank 1: " in error_of(replica.server.post("update"), 409)["message"]
        assert replica.holds(2)
        assert replica.is_settled()


@pytest.mark.slow
def test_a_node_that_is_lost_in_a_write_ends_serving_and_is_back(
    trainer: Trainer, tmp_path: Path
) -> None:
    with two_nodes(trainer, tmp_path) as (replica, _):
        replica.server.update(trainer.step())
        trainer.step()
        replica.strike("write", nth=4, kill=True)
        replica.server.client.timeout = 5
        with suppress(httpx.TransportError):
            assert not replica.server.post("update").is_success
        assert replica.is_struck()
        for answer in replica.last_words([5, 6, 7], SILENT_S):  # an engine may notice later
            assert answer.spans == ((0, 4, "1"),)
            assert replica.judge(1).wrong(answer.prompt, answer.tokens, range(4)) == []
        assert not replica.server.alive or replica.server.readiness() <= {503}
    with two_nodes(trainer, tmp_path) as (replica, _):
        assert replica.holds(2)
        assert replica.serves(2)


@pytest.mark.slow
@pytest.mark.skipif(ENGINE != "vllm", reason="of vLLM's executor")
def test_a_node_that_is_lost_while_idle_ends_the_engine(trainer: Trainer, tmp_path: Path) -> None:
    """It is as without deltachain, whose questions a dead rank does not answer."""
    limit_s = 60
    limit = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(limit_s)}
    with two_nodes(trainer, tmp_path, environment=limit) as (replica, node):
        assert replica.serves(0)
        (rank,) = (one for one in node.children(True) if "Worker" in one.cmdline()[0])
        rank.kill()
        time.sleep(2 * EVERY_S)  # it is asked meanwhile
        replica.server.client.timeout = 2 * limit_s
        with pytest.raises((httpx.TransportError, AssertionError)):
            replica.server.generate([5, 6, 7], 4)
        until = time.monotonic() + 2 * STOP_S
        while replica.server.alive:
            assert time.monotonic() < until
            time.sleep(1)
