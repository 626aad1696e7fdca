"""A trainer and a follower on real servers, behind a network that answers in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from threading import Event, Thread
from typing import TYPE_CHECKING, TypeAlias

import pytest

from deltachain.errors import DeltaChainError
from deltachain.store import Store, open_store
from deltachain.subscribe import SubscribeConfig, Subscriber
from tests.faults.test_convergence import Trainer
from tests.support.models import bits_of, plain_model, same, tensors_of
from tests.support.proxy import Proxy

if TYPE_CHECKING:
    from tests.support.hub.server import HubServer
    from tests.support.seaweed import Seaweed

Place: TypeAlias = tuple[Proxy, Callable[[], Store]]

FAULTS: dict[str, Callable[[Proxy], None]] = {
    "301": lambda proxy: proxy.answer("301 Moved", "Location: https://portal.example/login"),
    "308": lambda proxy: proxy.answer("308 Moved", "Location: /login"),
    "portal": lambda proxy: proxy.answer("200 OK", body=b"<html>Welcome</html>"),
    "swallowed writes": lambda proxy: proxy.answer("200 OK", method="PUT"),
    "swallowed posts": lambda proxy: proxy.answer("200 OK", body=b"{}", method="POST"),
    "drip": lambda proxy: proxy.drip(0.2),
}


@pytest.fixture(params=["seaweed", "hub"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with ExitStack() as stack:

        def opened(port: int, url: str, **options: object) -> Place:
            proxy = stack.enter_context(Proxy(port))

            def opening() -> Store:
                store = open_store(url, options | {given: proxy.endpoint}, writer=True)
                stack.callback(store.close)
                return store

            return proxy, opening

        if request.param == "seaweed":
            server: Seaweed = request.getfixturevalue("seaweed")
            given, url = "endpoint_url", request.getfixturevalue("s3_url")()
            yield opened(server.port, url, **{**server.options, "deadline_s": 2.0})
        else:
            hub: HubServer = request.getfixturevalue("hub")
            given, bucket = "endpoint", request.getfixturevalue("bucket")
            hub.configure(calls=1_000_000)
            port = int(hub.url.rpartition(":")[2])
            options = {"token": hub.token, "calls": 1_000_000, "deadline_s": 2.0}
            yield opened(port, f"hf://buckets/{bucket}/run", **options)


LONGER = ("308", "swallowed posts", "drip")


@pytest.mark.parametrize(
    "fault",
    [pytest.param(each, marks=[pytest.mark.slow] * (each in LONGER)) for each in FAULTS],
)
def test_all_survive_and_converge_when_the_network_is_right_again(place: Place, fault: str) -> None:
    proxy, opening = place
    trainer = Trainer(opening(), plain_model()).attach()
    trainer.step(1)
    store = opening()
    tensors = tensors_of(trainer.model)
    config = SubscribeConfig(url=store.url, poll_s=0.1)
    subscriber = Subscriber(config, tensors, store=store)
    stop = Event()
    held: list[int] = []
    troubles: list[DeltaChainError] = []

    def follow() -> None:
        for receipt in subscriber.follow(
            stop=stop, looked=lambda error: troubles.append(error) if error else None
        ):
            held.append(receipt.version)  # noqa: PERF401 - it is read meanwhile

    following = Thread(target=follow)
    following.start()
    try:
        wait_for(lambda: held == [1])
        FAULTS[fault](proxy)
        trainer.step(2)  # warns where it cannot publish
        if not fault.startswith("swallowed"):
            wait_for(lambda: bool(troubles))
        assert following.is_alive()
        proxy.reset()
        trainer.step(3)
        wait_for(lambda: bool(held) and held[-1] == trainer.publisher.version)
    finally:
        proxy.reset()
        stop.set()
        following.join()
        trainer.publisher.close()
    assert all(error.retryable for error in troubles)
    assert same(bits_of(tensors), bits_of(trainer.model))


def wait_for(done: Callable[[], bool]) -> None:
    for _ in range(600):
        if done():
            return
        Event().wait(0.1)
    raise AssertionError("it does not come to that")
