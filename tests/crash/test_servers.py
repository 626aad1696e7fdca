"""A server that is killed and comes back, under a publisher, a follower, or both at once."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from threading import Event, Thread
from typing import Any, Self

import pytest
import torch
from torch import nn

from deltachain.chain.chain import Chain
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import open_store
from deltachain.subscribe import SubscribeConfig, Subscriber
from deltachain.verify import verify
from tests.crash.child import Place
from tests.support.faults import Fault, FaultyStore
from tests.support.models import State, bits_of, fill_, recompute, same, tensors_of, train_
from tests.support.values import eventually

pytestmark = pytest.mark.full

DOWN_S = 0.5


class Killer:
    def __init__(self, server: Any) -> None:
        self._server = server
        self._threads: list[Thread] = []

    def kill(self) -> None:
        self._server.kill()
        self._later(DOWN_S, self._server.restart)

    def kill_after(self, seconds: float) -> None:
        self._later(seconds, self.kill)

    def join(self) -> None:
        for thread in self._threads:  # grows while it is walked: each kill starts another
            thread.join()

    def _later(self, seconds: float, call: Callable[[], object]) -> None:
        def run() -> None:
            time.sleep(seconds)
            call()

        self._threads.append(Thread(target=run))
        self._threads[-1].start()


@pytest.fixture(params=["s3", "hf"])
def place(request: pytest.FixtureRequest, place_of: Callable[[str], Place]) -> Place:
    return place_of(request.param)


@pytest.fixture
def killer(place: Place, request: pytest.FixtureRequest) -> Iterator[Killer]:
    killer = Killer(request.getfixturevalue({"s3": "seaweed", "hf": "hub"}[place.kind]))
    yield killer
    killer.join()


def model_of(layers: int) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(1024, 1024, dtype=torch.bfloat16) for _ in range(layers)))
    fill_(model, 0)
    return model


def check(url: str, truth: list[State]) -> None:
    with closing(open_store(url)) as store:
        found = recompute(store)
        assert list(found) == list(range(len(truth)))
        assert all(same(found[v].state, state) for v, state in enumerate(truth))
        proofs = list(verify(Chain.open(store)))
        assert len(proofs) == len(truth)


@pytest.mark.parametrize("prefix", ["deltas/", "manifests/"])
def test_a_server_dies_in_the_middle_of_a_publish(
    place: Place, killer: Killer, prefix: str
) -> None:
    url, model = place.url(), model_of(2)
    config = PublishConfig(url=url, part_nbytes=1 << 12)
    store = FaultyStore(open_store(url, writer=True))
    with Publisher(config, store=store).attach(model) as publisher:
        truth: list[State] = [bits_of(model)]
        for step in (1, 2):
            store.add(Fault(killer.kill, prefix, nth=2 if prefix == "deltas/" else 1))
            train_(model, step)
            publisher.publish(step=step)
            publisher.flush()
            truth.append(bits_of(model))
        assert [key.startswith(prefix) for _, key in store.struck] == [True, True]
    check(url, truth)


def test_a_server_dies_in_the_middle_of_a_fetch(place: Place, killer: Killer) -> None:
    url, model = place.url(), model_of(24)
    with Publisher(PublishConfig(url=url)).attach(model):
        pass
    tensors = tensors_of(model)
    with Subscriber(url, tensors) as subscriber:
        assert subscriber.chain.has(0)
        killer.kill_after(0.02)
        began = time.monotonic()
        receipt = subscriber.update()
        assert time.monotonic() - began > DOWN_S  # it was struck, and waited
    assert receipt is not None
    assert same(bits_of(tensors), bits_of(model))


class Following:
    def __init__(self, url: str, target: Any) -> None:
        self.subscriber = Subscriber(SubscribeConfig(url=url, poll_s=0.05), target)
        self.versions: list[int] = []
        self._stop = Event()
        self._thread = Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        for receipt in self.subscriber.follow(stop=self._stop):
            self.versions.append(receipt.version)

    def wait_for(self, version: int) -> None:
        eventually(lambda: self.subscriber.version == version)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.subscriber.notify()
        self._thread.join()
        self.subscriber.close()


@pytest.mark.slow
def test_a_server_dies_again_and_again(place: Place, killer: Killer, tmp_path: Path) -> None:
    url, model = place.url(), model_of(2)
    tensors = tensors_of(model)
    config = PublishConfig(url=url, anchor_factor=0.5)
    with (
        Publisher(config).attach(model) as publisher,
        Following(url, tensors) as one,
        Following(url, tmp_path / "mirror") as two,
    ):
        truth: list[State] = [bits_of(model)]
        for step in range(1, 10):
            if step % 3 == 0:
                killer.kill_after(0.02 * step)
            train_(model, step)
            publisher.publish(step=step)
            publisher.flush()
            truth.append(bits_of(model))
        for follower in (one, two):
            follower.wait_for(9)
            assert follower.versions == sorted(set(follower.versions))
        assert same(bits_of(tensors), truth[-1])
        assert two.subscriber.scrub()
    check(url, truth)
