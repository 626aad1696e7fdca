"""What a fleet is told after its store went back: by replicas that hold what is there no more."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import nn

from deltachain.chain.chain import Chain
from deltachain.control.fleet import Announced, Fleet
from deltachain.publish import PublishConfig, Publisher
from deltachain.replica.leader import Leader
from deltachain.replica.settings import ReplicaSettings
from deltachain.store import MemoryStore
from deltachain.subscribe import SubscribeConfig
from tests.accidents.scene import Objects
from tests.support.engine import Sharding, full_of
from tests.support.models import train_
from tests.unit.control.replicas import app_of, served
from tests.unit.replica.replicas import Followed

PATIENCE_S = 60.0


class Restored:
    """An engine at version 4 of a chain, whose store was put back to version 2."""

    def __init__(self, folder: Path) -> None:
        self.here = Followed(Sharding(tp=2), folder)
        self.here.publish(1, 2)
        self.model: nn.Module = copy.deepcopy(self.here.model)
        self.copy = self._objects()
        self.here.publish(3, 4)
        config = SubscribeConfig(url=self.here.store.url, poll_s=0.005)
        settings = ReplicaSettings(subscribe=config, follow=True, spool=folder / "spool")
        self.leader = Leader(settings, self.here.engine, store=self.here.faulty)
        self.leader.start()
        assert self.here.holds(4)
        self.here.publisher.close()

    def restore(self) -> None:
        for key in self._objects():
            self.here.store.delete(key)
        for key, data in self.copy.items():
            self.here.store.put(key, data)

    def train_again(self, versions: int) -> None:
        if versions == 0:
            return
        store = self.here.store
        with Publisher(PublishConfig(url=store.url), store=store).attach(self.model) as publisher:
            for step in range(1, versions):
                train_(self.model, 100 + step, share=0.05)
                publisher.publish(step=step)
                publisher.flush()

    def close(self) -> None:
        self.leader.stop()
        self.here.close()

    def _objects(self) -> Objects:
        return {info.key: self.here.store.get(info.key) for info in self.here.store.list()}


@pytest.fixture
def restored(tmp_path: Path) -> Iterator[Restored]:
    made = Restored(tmp_path)
    yield made
    made.close()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def announce(url: str, store: MemoryStore, *, deadline: float = PATIENCE_S) -> Announced:
    head = Chain.open(store).head()
    assert head is not None
    with Fleet([url]) as fleet:
        return fleet.announce(head.version, manifest=head.digest, wait="all", deadline=deadline)


@pytest.mark.parametrize("versions", [0, 1, 2, 3], ids=["dead", "below", "equal", "beyond"])
def test_a_replica_of_a_lost_history_is_never_counted(restored: Restored, versions: int) -> None:
    with served(app_of(restored.leader, is_open=True)) as url:
        store = restored.here.store
        assert announce(url, store).enough
        restored.restore()
        restored.train_again(versions)
        announced = announce(url, store, deadline=0.5)
        assert announced.version == 2 + versions
        assert not announced.enough
        assert announced.stragglers == (url,)
        wait_until(lambda: not restored.leader.status().ready)
        status = restored.leader.status()
        assert status.version == 4
        assert status.reason
        assert status.lag_versions is None or status.lag_versions >= 0


def test_a_replica_that_rolled_back_to_what_is_there_goes_on(restored: Restored) -> None:
    with served(app_of(restored.leader, is_open=True)) as url:
        restored.restore()
        wait_until(lambda: not restored.leader.status().ready)
        restored.leader.rollback(2)
        restored.leader.release()
        restored.train_again(3)
        assert announce(url, restored.here.store).enough
        wait_until(lambda: restored.leader.status().ready)
        assert restored.here.engine.holds(full_of(restored.model))
