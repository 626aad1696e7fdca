"""``python -m tests.e2e.hub_followers``: requests and delay of followers on the emulated Hub."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from threading import Event, Thread
from typing import Any, Final

from deltachain.publish import PublishConfig, Publisher
from deltachain.subscribe import SubscribeConfig, Subscriber
from tests.bench import report
from tests.support.hub.server import HubServer
from tests.support.models import plain_model, tensors_of, train_

BUCKET: Final = "me/followers"


class Fleet:
    def __init__(self, hub: HubServer, feed: str, followers: int) -> None:
        hub.reset(feed=feed, calls=1_000_000)
        url = f"hf://buckets/{BUCKET}/{feed}"
        options = {"endpoint": hub.url, "token": hub.token, "calls": 1_000_000}
        self.model, self.stop = plain_model(), Event()
        self.committed: dict[int, float] = {}
        self.arrived: list[tuple[int, float]] = []
        config = SubscribeConfig(url=url, storage_options=options)
        self.followers = [Subscriber(config, tensors_of(self.model)) for _ in range(followers)]
        self.publisher = Publisher(PublishConfig(url=url, storage_options=options))
        self.publisher.attach(self.model)
        self.threads = [Thread(target=self._follow, args=(one,)) for one in self.followers]
        for thread in self.threads:
            thread.start()
        self.wait(lambda: self.holds(0) and (feed == "absent" or hub.streams() == followers))

    @property
    def requests(self) -> int:
        return sum(follower.store.requests for follower in self.followers)

    def holds(self, version: int) -> bool:
        return all(follower.version == version for follower in self.followers)

    def publish(self, step: int) -> None:
        train_(self.model, step)
        self.publisher.publish(step=step).result()
        self.committed[step] = time.monotonic()

    def delays(self) -> list[float]:
        return [max(0.0, at - self.committed[v]) for v, at in self.arrived if v]

    def close(self) -> None:
        self.stop.set()
        for follower, thread in zip(self.followers, self.threads, strict=True):
            follower.notify()
            thread.join()
            follower.close()
        self.publisher.close()

    def wait(self, condition: Callable[[], bool]) -> None:
        while not condition():
            time.sleep(0.02)

    def _follow(self, follower: Subscriber) -> None:
        for receipt in follower.follow(stop=self.stop):
            self.arrived.append((receipt.version, time.monotonic()))


def measure(hub: HubServer, feed: str, asked: argparse.Namespace) -> dict[str, Any]:
    fleet = Fleet(hub, feed, asked.followers)
    before = fleet.requests
    for step in range(1, asked.versions + 1):
        time.sleep(asked.every)
        fleet.publish(step)
    fleet.wait(lambda: fleet.holds(asked.versions))
    busy, before = fleet.requests - before, fleet.requests
    time.sleep(asked.idle)
    idle = fleet.requests - before
    fleet.close()
    delays = fleet.delays()
    return {
        "requests_a_version": busy / asked.followers / asked.versions,
        "idle_requests_a_minute": idle / asked.followers / asked.idle * 60,
        "median_s": median(delays),
        "p90_s": quantiles(delays, n=10)[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.hub_followers")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--followers", type=int, default=4)
    parser.add_argument("--versions", type=int, default=12)
    parser.add_argument("--every", type=float, default=7.0, help="seconds between two versions")
    parser.add_argument("--idle", type=float, default=150.0, help="seconds without versions")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, HubServer(Path(folder)) as hub:
        hub.create_bucket(BUCKET)
        found = {feed: measure(hub, feed, asked) for feed in ("live", "absent")}
    title = f"{asked.followers} followers, a version every {asked.every:g} s"
    table = report.grid(title, "", "with the feed", "without")
    for label, name in (
        ("requests of a follower, a version", "requests_a_version"),
        ("requests of a follower, an idle minute", "idle_requests_a_minute"),
        ("commit to applied, median, s", "median_s"),
        ("commit to applied, 90 %, s", "p90_s"),
    ):
        table.add_row(label, *(f"{found[feed][name]:.2f}" for feed in ("live", "absent")))
    document = {"benchmark": "hub-followers", "found": found, "machine": report.machine()}
    caveat = "On the emulated Hub, which is near: add the round trips of a real one."
    report.emit(document, [table], json_output=asked.json, caveat=caveat)


if __name__ == "__main__":
    main()
