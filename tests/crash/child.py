"""One process of a crash test: it publishes, follows or mirrors until it kills itself."""

import importlib
import os
import signal
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltachain.chain.chain import Chain
from deltachain.errors import DeltaChainError
from deltachain.format.keys import manifest_key
from deltachain.maintain import KeepRule, Maintainer, Pruner
from deltachain.maintain.survey import Survey
from deltachain.mirror import Mirror
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import open_store
from deltachain.subscribe import Subscriber
from tests.support.faults import Fault, FaultyStore
from tests.support.models import TinyModel, replica_of, train_

KINDS = ("file", "s3", "hf")


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process and its children get in by the environment alone."""

    kind: str
    root: str

    def url(self, name: str = "chain") -> str:
        return f"{self.root}/{name}"


def open_place(
    kind: str, folder: Path, server: Callable[[str], Any], setenv: Callable[[str, str], None]
) -> Place:
    if kind == "file":
        return Place(kind, str(folder))
    name = uuid.uuid4().hex
    if kind == "s3":
        seaweed = server("seaweed")
        for variable, value in seaweed.env().items():
            setenv(variable, value)
        return Place(kind, seaweed.url(name))
    hub = server("hub")
    for variable, value in hub.env().items():
        setenv(variable, value)
    setenv("DELTACHAIN_HF_CALLS", "1000000")  # a Hub without limits: these have their own tests
    hub.configure(calls=1_000_000)
    hub.create_bucket(f"crash/{name}")
    return Place(kind, f"hf://buckets/crash/{name}")


def contents(url: str, prefix: str = "") -> dict[str, bytes]:
    with closing(open_store(url)) as store:
        return {info.key: store.get(info.key) for info in store.list(prefix)}


def copy_store(url: str, other: str) -> None:
    with closing(open_store(other)) as store:
        for key, data in contents(url).items():
            store.put(key, data)


KEPT = 24

GRACE_S = 1.5


def publish_until(
    url: str, stop: Path, environment: Mapping[str, str], printed: Path, pause_s: float
) -> None:
    _begin(environment, printed)
    model = TinyModel()
    config = PublishConfig(url=url, anchor_every=16)
    with Publisher(config, store=open_store(url, writer=True)).attach(model) as publisher:
        step = 0
        while not stop.exists():
            step += 1
            train_(model, step)
            publisher.publish(step=step)
            publisher.flush()
            time.sleep(pause_s)


def maintain_for_ever(
    url: str, environment: Mapping[str, str], printed: Path, last: int = KEPT
) -> None:
    _begin(environment, printed)
    maintainer = maintainer_of(url, last=last)
    while True:
        try:
            done = maintainer.round()
            if done is not None and done.pruned is not None and done.pruned.due:
                print(f"pruned {len(done.pruned.due)}", flush=True)  # noqa: T201 - read by the test
        except DeltaChainError as error:
            print(f"{type(error).__name__}: {error}", flush=True)  # noqa: T201 - read by the test
        time.sleep(0.05)


def maintainer_of(url: str, grace_s: float = GRACE_S, last: int = KEPT) -> Maintainer:
    chain = Chain.open(open_store(url, writer=True))
    pruner = Pruner(Survey(chain), KeepRule(last=last), grace_s=grace_s)
    return Maintainer(chain, pruner, anchor_every=64)


def _begin(environment: Mapping[str, str], printed: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    with printed.open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


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
    die_in(*kill)  # a new folder is filled while it is staged
    staged = subscriber.stage(last)
    assert staged is not None
    subscriber.swap(staged)


def mirror(url: str, destination: str, do: Any, nth: int) -> None:
    there = FaultyStore(open_store(destination, writer=True), Fault(do, nth=nth))
    for _ in Mirror(open_store(url), there).catch_up():
        pass


def die_in(module: str, name: str, nth: int, when: str) -> None:
    """Let the n-th call of a function be the last thing that this process does."""
    home: Any = importlib.import_module(module)
    while "." in name:
        inner, name = name.split(".", 1)
        home = getattr(home, inner)
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
