"""A revert reaches the ranks of an engine, and of one that is started again afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltachain.chain.chain import Chain
from deltachain.publish.revert import revert
from deltachain.replica.target import ReplicaTarget
from deltachain.subscribe import SubscribeConfig, Subscriber
from tests.support.engine import FakeEngine
from tests.unit.replica.replicas import SHAPES, Followed


@pytest.mark.parametrize("shape", ["tp1", "tp2", "tp2pp2"])
def test_running_and_restarted_engines_go_back(shape: str, tmp_path: Path) -> None:
    here = Followed(SHAPES[shape], tmp_path)
    here.publish(1, 2, 3)
    here.subscriber.update()
    assert here.holds(3)
    chain = Chain.open(here.store)
    revert(chain, chain.read(1))
    receipt = here.subscriber.update()
    assert receipt is not None
    assert receipt.version == 4
    assert here.holds(1)
    revert(chain, chain.read(2))  # the engine is down
    spool = tmp_path / "restarted"
    engine = FakeEngine(SHAPES[shape], tmp_path / "model", spool)
    target = ReplicaTarget(engine, here.store.url, spool)
    config = SubscribeConfig(url=here.store.url)
    with Subscriber(config, target, store=here.store) as subscriber:
        subscriber.update()
        assert subscriber.version == 5
        assert engine.holds(here.truth[2])
