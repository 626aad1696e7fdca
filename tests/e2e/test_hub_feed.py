"""Followers of a bucket on the emulated Hub, woken by its feed, or by what is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread

import pytest

from deltachain.publish import PublishConfig, Publisher
from deltachain.subscribe import SubscribeConfig, Subscriber
from tests.support.hub.server import HubServer
from tests.support.models import bits_of, plain_model, same, tensors_of, train_

LONG_S = 120.0
NEVER_S = 100_000.0


class Run:
    def __init__(self, hub: HubServer, bucket: str) -> None:
        url = f"hf://buckets/{bucket}/run"
        self.hub, self.url = hub, url
        self.options = {"endpoint": hub.url, "token": hub.token, "calls": 1_000_000}
        self.model, self.step, self.stop = plain_model(), 0, Event()
        self.receipts: SimpleQueue[int] = SimpleQueue()
        config = PublishConfig(url=url, storage_options=self.options)
        self.publisher = Publisher(config).attach(self.model)
        self.target = tensors_of(self.model)
        self.follower: Subscriber | None = None
        self.thread: Thread | None = None

    def start(self, poll_s: float) -> Subscriber:
        config = SubscribeConfig(url=self.url, storage_options=self.options, poll_s=poll_s)
        follower = self.follower = Subscriber(config, self.target)

        def follow() -> None:
            for receipt in follower.follow(stop=self.stop):
                self.receipts.put(receipt.version)

        self.thread = Thread(target=follow)
        self.thread.start()
        assert self.receipts.get(timeout=LONG_S) == self.publisher.version
        return follower

    def publish(self) -> None:
        self.step += 1
        train_(self.model, self.step)
        self.publisher.publish(step=self.step).result()

    def arrives(self) -> None:
        while self.receipts.get(timeout=LONG_S) != self.publisher.version:
            pass
        assert same(bits_of(self.target), bits_of(self.model))

    def close(self) -> None:
        self.stop.set()
        if self.follower is not None and self.thread is not None:
            self.follower.notify()
            self.thread.join()
            self.follower.close()
        self.publisher.close()


@pytest.fixture
def run(hub: HubServer, bucket: str) -> Iterator[Run]:
    hub.configure(calls=1_000_000)
    made = Run(hub, bucket)
    yield made
    made.close()
    assert not [each for each in threading.enumerate() if each.name == "deltachain-feed"]


def until(condition: Callable[[], bool]) -> None:
    waiting = Event()
    for _ in range(int(LONG_S / 0.02)):
        if condition():
            return
        waiting.wait(0.02)
    raise AssertionError


def test_feed_wakes_a_follower_that_never_polls(run: Run) -> None:
    follower = run.start(NEVER_S)
    until(lambda: run.hub.streams() == 1)
    for _ in range(5):
        before = follower.store.requests
        run.publish()
        run.arrives()
        assert follower.store.requests - before <= 4
    until(lambda: not follower.told.is_set())
    idle = follower.store.requests
    assert run.hub.counts()
    Event().wait(0.5)
    assert follower.store.requests == idle


def test_versions_while_the_hub_restarts_are_followed(run: Run) -> None:
    run.start(NEVER_S)
    until(lambda: run.hub.streams() == 1)
    run.publish()
    run.arrives()
    run.hub.restart()
    run.publish()
    run.arrives()  # by the look that a feed asks for when it is back


@pytest.mark.parametrize("feed", ["absent", "stalled", "garbage", "cut", "deaf", "flood"])
def test_feed_that_is_of_no_use_costs_nothing_but_polls(run: Run, feed: str) -> None:
    run.hub.configure(feed=feed, feed_prefix="run/", ping_s=0.05, calls=1_000_000)
    follower = run.start(0.2)
    for _ in range(3):
        run.publish()
        run.arrives()
    assert follower.watch.doubt is None


def test_feed_that_lies_again_and_again_wakes_nobody_for_long(run: Run) -> None:
    run.hub.configure(feed="flood", feed_prefix="run/", calls=1_000_000)
    follower = run.start(NEVER_S)
    until(lambda: run.hub.streams() == 1)
    until(lambda: not follower.told.is_set())
    before = follower.store.requests
    Event().wait(1.0)  # with some 5,000 manifests announced
    assert follower.store.requests - before <= 4


def test_hub_that_gets_its_feed_back_is_followed_by_it(run: Run) -> None:
    run.hub.configure(feed="garbage", calls=1_000_000)
    run.start(0.2)
    run.publish()
    run.arrives()
    run.hub.configure(feed="live", calls=1_000_000)
    until(lambda: run.hub.streams() == 1)
    run.publish()
    run.arrives()


def test_ctrl_c_ends_a_follower_that_listens(run: Run, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "deltachain",
        "follow",
        run.url,
        "--out",
        str(tmp_path / "out"),
    ]
    with subprocess.Popen(
        command, env=os.environ | run.hub.env(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        until(lambda: run.hub.streams() == 1)
        assert process.stdout is not None
        assert process.stdout.readline()  # it has applied version 0
        process.send_signal(signal.SIGINT)
        assert b"Traceback" not in process.stdout.read()
    until(lambda: run.hub.streams() == 0)
