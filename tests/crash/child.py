"""One process of a crash test: it publishes, follows or mirrors until it kills itself."""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deltachain.format.keys import manifest_key
from deltachain.mirror import Mirror
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import open_store
from deltachain.subscribe import Subscriber
from tests.support.faults import Fault, FaultyStore
from tests.support.models import TinyModel, replica_of, train_

STEPS = 4
PART_NBYTES = 64


def publish(url: str, do: Any, prefix: str, nth: int, *, late: bool = False) -> None:
    """Train and publish version after version; an anchor goes behind each."""
    inner = open_store(url, writer=True)

    def wait_for_all() -> None:
        while inner.find(manifest_key(STEPS)) is None:
            time.sleep(0.01)

    store = FaultyStore(inner)
    if late:
        store.add(Fault(wait_for_all, f"anchors/{1:020d}-", times=None))
    store.add(Fault(do, prefix, nth=nth))
    config = PublishConfig(
        url=url, part_nbytes=PART_NBYTES, anchor_factor=0.001, anchor_memory=100.0
    )
    model = TinyModel()
    with Publisher(config, store=store).attach(model) as publisher:
        for step in range(1, STEPS + 1):
            train_(model, step)
            committed = publisher.publish(step=step)
            if late:
                committed.result(60)
            else:
                publisher.flush()


def follow(url: str, kind: str, folder: str, versions: list[int], kill: list[Any]) -> None:
    *first, last = versions
    subscriber = Subscriber(url, replica_of(TinyModel(), kind, Path(folder)).target)
    for version in first:
        subscriber.update(version)
    staged = subscriber.stage(last)
    assert staged is not None
    die_in(*kill)
    subscriber.swap(staged)


def mirror(url: str, destination: str, do: Any, nth: int) -> None:
    there = FaultyStore(open_store(destination, writer=True), Fault(do, nth=nth))
    for _ in Mirror(open_store(url), there).catch_up():
        pass


def die_in(module: str, name: str, nth: int, when: str) -> None:
    """Let the n-th call of a function be the last thing that this process does."""
    home: Any = importlib.import_module(module)
    original, calls = getattr(home, name), 0

    def deadly(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if calls == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(home, name, deadly)


def run_job(job: dict[str, Any], environment: Mapping[str, str], printed: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    with printed.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    roles: dict[str, Any] = {"publish": publish, "follow": follow, "mirror": mirror}
    roles[job.pop("role")](**job)
