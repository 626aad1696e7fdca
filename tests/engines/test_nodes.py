"""An engine over two nodes that share nothing but the store: each fetches for itself."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from examples.demo.online.processes import free_port
from tests.engines.replica import error_of, serving
from tests.engines.serving import ENGINE, Options, Server, server_class
from tests.engines.trainer import Trainer

pytestmark = pytest.mark.engine

ADDRESS = {"vllm": ("--master-addr", "127.0.0.1", "--master-port")}.get(
    ENGINE, ("--dist-init-addr",)
)
HEADLESS = {"vllm": ("--headless",)}.get(ENGINE, ())


def rendezvous() -> tuple[str, ...]:
    port = free_port()
    return "--nnodes", "2", *ADDRESS, str(port) if ENGINE == "vllm" else f"127.0.0.1:{port}"


@contextmanager
def second_node(trainer: Trainer, folder: Path, arguments: tuple[str, ...]) -> Iterator[None]:
    """Run the second node: the command of the first one, with its own number and spool."""
    options = Options(tp=2, plain=True, dev=True, strikes=folder / "strike", arguments=arguments)
    node: Server = server_class()(trainer.base, folder / "second", trainer.url, options)
    command = [*node._command, "--node-rank", "1", *HEADLESS]
    with node.log_path.open("ab") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=node._environment, start_new_session=True
        )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_each_node_fetches_for_itself(trainer: Trainer, tmp_path: Path) -> None:
    arguments = rendezvous()
    with (
        second_node(trainer, tmp_path, arguments),
        serving(trainer, tmp_path, 2, arguments=(*arguments, "--node-rank", "0")) as replica,
    ):
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
