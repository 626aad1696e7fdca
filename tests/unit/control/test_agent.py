"""An agent beside a server that reads folders."""

from __future__ import annotations

from pathlib import Path
from threading import Event

import pytest
import torch

from deltachain.checkpoint import Checkpoint
from deltachain.control.adapters import AdapterServer
from deltachain.control.agent import Agent
from deltachain.errors import ConfigError, ControlPlaneError
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import MemoryStore
from deltachain.subscribe import SubscribeConfig


class Served:
    """A server that is down as often as it is told to be."""

    def __init__(self, down: int = 0) -> None:
        self.down = down
        self.brought: list[tuple[int, float]] = []

    def bring(self, folder: Path, version: int) -> None:
        if self.down:
            self.down -= 1
            raise ControlPlaneError("down")
        if [number for number, _ in self.brought[-1:]] != [version]:
            found = Checkpoint(folder).bits("weight").view("float32")
            self.brought.append((version, float(found[0])))

    def close(self) -> None:
        pass


@pytest.fixture
def store() -> MemoryStore:
    made = MemoryStore()
    model = torch.nn.Linear(3, 2, bias=False)
    torch.nn.init.zeros_(model.weight)
    with Publisher(PublishConfig(url=made.url), store=made).attach(model) as publisher:
        for step in (1, 2):
            torch.nn.init.constant_(model.weight, step)
            publisher.publish(step=step).result(60)
    return made


def config(store: MemoryStore) -> SubscribeConfig:
    return SubscribeConfig(url=store.url, poll_s=0.01)


def test_the_server_reads_what_is_proven(store: MemoryStore, tmp_path: Path) -> None:
    server = Served()
    with Agent(config(store), tmp_path / "head", server, store=store) as agent:
        agent.update(1)
        agent.update()
        assert agent.update() is None
    assert server.brought == [(1, 1.0), (2, 2.0)]


def test_a_server_that_is_down_is_waited_for(store: MemoryStore, tmp_path: Path) -> None:
    server, stop = Served(down=3), Event()
    with Agent(config(store), tmp_path / "head", server, store=store) as agent:
        for receipt in agent.follow(stop):
            assert receipt.version == 2
            stop.set()
            agent.subscriber.notify()
        assert server.brought == []
        assert server.down == 2
        with pytest.raises(ControlPlaneError):
            agent.update()
        with pytest.raises(ControlPlaneError):
            agent.update()
        assert agent.update() is None
    assert server.brought == [(2, 2.0)]


@pytest.mark.parametrize(("name", "keep"), [("a/b", 2), ("", 2), ("a", 0)])
def test_names_that_are_no_names(tmp_path: Path, name: str, keep: int) -> None:
    with pytest.raises(ConfigError, match="plain name"):
        AdapterServer("http://127.0.0.1:9", name=name, folder=tmp_path, keep=keep)


def test_weights_that_are_no_adapter_are_refused(tmp_path: Path) -> None:
    server = AdapterServer("http://127.0.0.1:9", name="a", folder=tmp_path)
    server.versions = list  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="not an adapter's"):
        server.bring(tmp_path, 1)
