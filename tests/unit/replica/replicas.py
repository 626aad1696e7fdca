"""A trainer, its chain, and an engine of any shape that follows it."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from deltachain.errors import DeltaChainError
from deltachain.publish import PublishConfig, Publisher
from deltachain.replica.leader import Leader
from deltachain.replica.settings import ReplicaSettings
from deltachain.replica.target import ReplicaTarget
from deltachain.store import MemoryStore, Store
from deltachain.subscribe import SubscribeConfig, Subscriber
from tests.support.engine import FakeEngine, Full, Sharding, full_of, save, trained
from tests.support.faults import FaultyStore
from tests.support.models import train_

SHAPES = {
    "tp1": Sharding(),
    "tp2": Sharding(tp=2),
    "tp4": Sharding(tp=4),
    "pp2": Sharding(pp=2),
    "tp2pp2": Sharding(tp=2, pp=2),
    "untied": Sharding(untied=True),
    "untied tp2": Sharding(tp=2, untied=True),
}
EVERY_SHAPE = [
    pytest.param(shape, id=name, marks=() if name in ("tp2", "untied") else pytest.mark.full)
    for name, shape in SHAPES.items()
]


class Followed:
    """A model that is trained, and an engine whose ranks hold version 0 of it."""

    def __init__(
        self, shape: Sharding, folder: Path, *, store: Store | None = None, **settings: Any
    ) -> None:
        self.shape, self.folder = shape, folder
        self.model = trained(shape)
        self.store = store or MemoryStore()
        config = PublishConfig(url=self.store.url, anchor_factor=1e6)
        self.publisher = Publisher(config, store=self.store).attach(self.model)
        self.truth: list[Full] = [full_of(self.model)]
        self.spool = folder / "spool"
        self.engine = FakeEngine(shape, save(self.model, folder / "model"), self.spool)
        self.faulty = FaultyStore(self.store)
        self.subscriber = self.subscribe(**settings)

    @property
    def target(self) -> ReplicaTarget:
        target = self.subscriber.target
        assert isinstance(target, ReplicaTarget)
        return target

    def subscribe(self, **settings: Any) -> Subscriber:
        config = SubscribeConfig(url=self.store.url, poll_s=0.001, **settings)
        target = ReplicaTarget(self.engine, self.store.url, self.spool)
        return Subscriber(config, target, store=self.faulty)

    def publish(self, *seeds: int, share: float = 0.05) -> None:
        """Train and publish: one version for each seed."""
        for seed in seeds:
            train_(self.model, seed, share=share)
            self.publisher.publish(step=seed)
            self.publisher.flush()
            self.truth.append(full_of(self.model))

    def anchor(self) -> None:
        """Put an anchor behind the newest version."""
        session = self.publisher._session
        assert session is not None
        assert session.add_anchor(session.begin_anchor(), topic="").kind == "anchor"

    def holds(self, version: int) -> bool:
        """Whether every rank computes from exactly the bits of a version."""
        return self.engine.holds(self.truth[version])

    def scribble(self, rank: int, name: str, at: int = 0) -> None:
        """Somebody else writes: one bit of one element of a parameter of one rank."""
        live = self.engine.models[rank].root.get_parameter(name)
        live.data.view(-1).view(torch.int16)[at] ^= 1

    def spools(self) -> list[Path]:
        return sorted(self.spool.iterdir()) if self.spool.exists() else []

    def close(self) -> None:
        self.subscriber.close()
        with suppress(DeltaChainError):
            self.publisher.close()


@contextmanager
def led(here: Followed, **settings: object) -> Iterator[Leader]:
    """A leader of the engine, not started."""
    subscribe = SubscribeConfig(url=here.store.url, poll_s=0.001)
    leader = Leader(
        ReplicaSettings(subscribe=subscribe, spool=here.spool, **settings),  # type: ignore[arg-type]
        here.engine,
        store=here.faulty,
    )
    yield leader
    leader.stop()
