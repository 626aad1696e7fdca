"""A revert reaches a real server that is running, and one that is started again afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltachain.chain.chain import Chain
from deltachain.publish.revert import revert
from deltachain.store import open_store
from tests.engines.replica import serving
from tests.engines.trainer import Trainer

pytestmark = pytest.mark.engine


def go_back(url: str, version: int) -> int:
    chain = Chain.open(open_store(url))
    done = revert(chain, chain.read(version))
    assert done.committed is not None
    assert done.committed.state == chain.read(version).state
    return done.committed.version


def test_a_revert_reaches_a_running_and_a_restarted_server(tmp_path: Path) -> None:
    with Trainer(tmp_path) as trainer:
        for _ in range(3):
            trainer.step()
        with serving(trainer, tmp_path) as replica:
            assert replica.holds(3)
            running = go_back(trainer.url, 1)
            assert replica.server.update()["version"] == running == 4
            assert replica.holds(running)
            assert replica.has(trainer.pulled(1))
            assert replica.serves(running)
        restarted = go_back(trainer.url, 2)  # nobody is there to be told
        with serving(trainer, tmp_path) as replica:
            assert replica.server.status()["version"] == restarted == 5
            assert replica.holds(restarted)
            assert replica.has(trainer.pulled(2))
            assert replica.serves(restarted)
