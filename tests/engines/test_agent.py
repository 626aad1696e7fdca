"""A server without deltachain that is led from beside it, by folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deltachain.control.agent import Agent, ReloadServer
from deltachain.subscribe import SubscribeConfig
from tests.engines.expected import sharded
from tests.engines.serving import Server, start
from tests.engines.trainer import Trainer

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    with Trainer(tmp_path) as trainer:
        yield trainer


def holds(server: Server, checkpoint: Path) -> bool:
    return server.checksums() == {n: server.digest(t) for n, t in sharded(checkpoint, 1).items()}


def test_every_version_is_loaded_and_named(trainer: Trainer, tmp_path: Path) -> None:
    with start(trainer.base, tmp_path / "server", plain=True, dev=True) as server:
        reader = ReloadServer(str(server.client.base_url))
        config = SubscribeConfig(url=trainer.url, undo_applies=0)
        with Agent(config, tmp_path / "policy", reader) as agent:
            for _ in range(3):
                version = trainer.step()
                agent.update()
                assert server.named() == str(version)
                assert not server.paused()
                assert holds(server, trainer.pulled(version))
            said = server.generate([5, 6, 7], 8)
            assert said.spans == ((0, 8, "3"),)
