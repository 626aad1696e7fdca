"""A trainer and a follower on real servers, behind a network that answers in their place."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from threading import Event, Thread
from typing import TYPE_CHECKING, TypeAlias

import pytest
from torch import nn

from deltachain.errors import DeltaChainError
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import MemoryStore, Store, open_store
from deltachain.subscribe import SubscribeConfig, Subscriber
from tests.support import models
from tests.support.faults import Action, Fault, FaultyStore, clock_jump
from tests.support.proxy import Proxy
from tests.support.values import eventually

if TYPE_CHECKING:
    from tests.support.hub.server import HubServer
    from tests.support.seaweed import Seaweed


WRITES: list[Action] = ["fail", "lose-reply", "full", "refuse", "own-412", "slow"]
READS: list[Action] = ["fail-read", "cut", "corrupt", "truncate", "hide", "slow"]
PLACES = ["", "manifests/", "deltas/", "anchors/", "edges/", "head.json"]
CREATED = ["", "manifests/", "edges/"]
"""Where objects are put only if they are absent, among others."""

HOURS = 3600.0
LAST = 4


@pytest.fixture
def inner() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def faulty(inner: MemoryStore) -> FaultyStore:
    return FaultyStore(inner)


def fault(action: Action, prefix: str = "", *, nth: int = 1, times: int | None = 2) -> Fault:
    return Fault(action, prefix, nth=nth, times=times, seconds=0.002)


class Trainer:
    def __init__(self, store: Store, model: nn.Module) -> None:
        config = PublishConfig(url=store.url, on_error="warn", anchor_factor=0.001)
        self.model, self.states = model, [models.bits_of(model)]
        self.publisher = Publisher(config, store=store)

    def attach(self) -> "Trainer":
        self.publisher.attach(self.model)
        return self

    def step(self, seed: int) -> None:
        models.train_(self.model, seed, share=0.02)
        self.states.append(models.bits_of(self.model))
        self.publisher.publish(step=seed)
        self.publisher.flush()


def attached(store: FaultyStore, model: nn.Module) -> Trainer:
    for _ in range(12):
        with suppress(DeltaChainError):
            return Trainer(store, model).attach()
    raise AssertionError("the trainer does not start")


def assert_converged(inner: MemoryStore, trainer: Trainer) -> None:
    found = models.recompute(inner)
    for version in found.values():
        assert any(models.same(version.state, state) for state in trainer.states)
    newest = found[max(found)].state
    assert models.same(newest, models.bits_of(trainer.model))
    tensors = models.tensors_of(trainer.model)
    Subscriber(SubscribeConfig(url=inner.url), tensors, store=inner).update()
    assert models.same(models.bits_of(tensors), newest)


def go_on_and_converge(inner: MemoryStore, trainer: Trainer, seeds: range) -> None:
    for seed in seeds:
        trainer.step(seed)
    trainer.publisher.close()
    assert_converged(inner, trainer)


# Trainers


@pytest.mark.parametrize(
    ("action", "prefix"),
    [
        (action, prefix)
        for action in WRITES
        for prefix in (CREATED if action == "own-412" else PLACES)
    ],
)
def test_trainer_whose_writes_go_wrong(
    inner: MemoryStore, faulty: FaultyStore, action: Action, prefix: str
) -> None:
    trainer = Trainer(faulty, models.plain_model()).attach()
    faulty.add(fault(action, prefix))
    go_on_and_converge(inner, trainer, range(1, 5))
    assert len(faulty.struck) == 2


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("action", [*WRITES, *READS[:-1]])
def test_trainer_that_starts_while_the_store_goes_wrong(
    inner: MemoryStore, faulty: FaultyStore, action: Action, nth: int
) -> None:
    first = Trainer(inner, models.plain_model()).attach()
    for seed in (1, 2):
        first.step(seed)
    # The first write is the start's own, and three that fail cost up to three versions.
    faulty.add(fault(action, nth=nth, times=3))
    trainer = attached(faulty, first.model)
    trainer.states += first.states
    go_on_and_converge(inner, trainer, range(3, 7))
    assert len(faulty.struck) == 3


@pytest.mark.parametrize("action", [action for action in READS if action != "slow"])
def test_trainer_that_can_not_read_back_what_it_wrote(
    inner: MemoryStore, faulty: FaultyStore, action: Action
) -> None:
    trainer = Trainer(faulty, models.plain_model()).attach()
    # A store that goes on hiding what it has just refused to overwrite breaks its promise: the
    # trainer then takes its own version for another's, and stops.
    times = 1 if action == "hide" else 3
    faulty.add(fault("own-412", "manifests/", times=1), fault(action, "manifests/", times=times))
    go_on_and_converge(inner, trainer, range(1, 6))
    assert ("own-412", f"manifests/{1:020d}.json") in faulty.struck
    assert any(struck == action for struck, _ in faulty.struck)


@pytest.mark.parametrize("action", ["own-412", "slow", "stale-list"])
def test_chain_that_never_knows_it_otherwise(
    inner: MemoryStore, faulty: FaultyStore, action: Action
) -> None:
    faulty.add(fault(action, times=None))
    trainer = Trainer(faulty, models.plain_model()).attach()
    for seed in (1, 2, 3):
        trainer.step(seed)
    assert trainer.publisher.version == 3
    again = Trainer(faulty, trainer.model).attach()
    again.states += trainer.states
    again.step(4)
    assert again.publisher.version == 5
    assert [found.anchored for found in models.recompute(faulty.inner).values()][1]
    assert_converged(inner, again)


# Followers


class Waits:
    """Instead of waiting, the trainer goes on; a follower that needs too many waits is lost."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.left = trainer, 60

    def __call__(self, _seconds: float) -> bool:
        self.left -= 1
        assert self.left, "the follower does not converge"
        if self.trainer.publisher.version < LAST:
            self.trainer.step(self.trainer.publisher.version + 1)
        return False


@pytest.fixture
def trainer(inner: MemoryStore) -> Iterator[Trainer]:
    trainer = Trainer(inner, models.plain_model()).attach()
    trainer.step(1)
    yield trainer
    trainer.publisher.close()


class Follower:
    """A subscriber of the trainer, through a store that goes wrong."""

    def __init__(self, faulty: FaultyStore, trainer: Trainer) -> None:
        self.faulty, self.trainer = faulty, trainer
        self.tensors = models.tensors_of(trainer.model)
        config = SubscribeConfig(url=faulty.inner.url)
        self.subscriber = Subscriber(config, self.tensors, store=faulty)

    def holds(self, state: models.State) -> bool:
        return models.same(models.bits_of(self.tensors), state)

    def follow(self) -> None:
        stop = Event()
        for receipt in self.subscriber.follow(stop=stop):
            assert self.holds(self.trainer.states[receipt.version])
            assert receipt.staleness_s >= 0
            if receipt.version == LAST:
                stop.set()
        assert self.holds(models.bits_of(self.trainer.model))


@pytest.fixture
def follower(faulty: FaultyStore, trainer: Trainer) -> Follower:
    return Follower(faulty, trainer)


@pytest.mark.parametrize("prefix", [prefix for prefix in PLACES if prefix != "edges/"])
@pytest.mark.parametrize("action", READS)
def test_follower_whose_reads_go_wrong(
    follower: Follower, monkeypatch: pytest.MonkeyPatch, action: Action, prefix: str
) -> None:
    monkeypatch.setattr(follower.subscriber.told, "wait", Waits(follower.trainer))
    follower.faulty.add(fault(action, prefix, times=3))
    follower.follow()
    assert follower.faulty.struck


# The clock


JUMPS = (5 * HOURS, -9 * HOURS, 0.0, -48 * HOURS, 48 * HOURS)


@pytest.mark.parametrize("viewed_from", [0.0, 100 * HOURS, -100 * HOURS])
def test_nothing_is_decided_by_the_clock(inner: MemoryStore, viewed_from: float) -> None:
    model = models.plain_model()
    tensors = models.tensors_of(model)
    subscriber = Subscriber(SubscribeConfig(url=inner.url), tensors, store=inner)
    trainer = Trainer(inner, model)
    with clock_jump(-20 * HOURS):
        trainer.attach()
    for version, jump in enumerate(JUMPS, 1):
        with clock_jump(jump):
            trainer.step(version)
        with clock_jump(viewed_from):
            receipt = subscriber.update()
        assert receipt is not None
        assert receipt.version == version
        assert receipt.staleness_s >= 0
        assert (receipt.staleness_s < 90) is (viewed_from - jump < 90)
        assert models.same(models.bits_of(tensors), trainer.states[version])

    with clock_jump(-30 * HOURS):  # takes over long before the last version
        later = Trainer(inner, model).attach()
        assert (later.publisher.version, later.publisher.epoch) == (6, 1)
        later.step(7)
    with clock_jump(30 * HOURS):  # the old one still learns that it was
        trainer.publisher.publish()
        trainer.publisher.flush()
    assert later.publisher.version == max(models.recompute(inner)) == 7

    with clock_jump(-99 * HOURS):
        assert subscriber.update() is not None
        assert subscriber.rollback(3).version == 3
        assert models.same(models.bits_of(tensors), trainer.states[3])
        assert subscriber.update() is None
        subscriber.release()
    with clock_jump(99 * HOURS):
        receipt = subscriber.update()
    assert receipt is not None
    assert receipt.version == 7
    assert models.same(models.bits_of(tensors), models.bits_of(model))


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
    options: dict[str, object] = {"deadline_s": 2.0}
    if request.param == "seaweed":
        server: Seaweed = request.getfixturevalue("seaweed")
        port, url = server.port, request.getfixturevalue("s3_url")()
        given, options = "endpoint_url", options | server.options
    else:
        hub: HubServer = request.getfixturevalue("hub")
        hub.configure(calls=1_000_000)
        port, url = int(hub.url.rpartition(":")[2]), request.getfixturevalue("bucket")
        given, url = "endpoint", f"hf://buckets/{url}/run"
        options |= {"token": hub.token, "calls": 1_000_000}
    with ExitStack() as stack:
        proxy = stack.enter_context(Proxy(port))

        def opening() -> Store:
            store = open_store(url, options | {given: proxy.endpoint}, writer=True)
            return stack.enter_context(closing(store))

        yield proxy, opening


LONGER = ("308", "swallowed posts", "drip")


@pytest.mark.full
@pytest.mark.parametrize(
    "fault",
    [pytest.param(each, marks=[pytest.mark.slow] * (each in LONGER)) for each in FAULTS],
)
def test_all_survive_and_converge_when_the_network_is_right_again(place: Place, fault: str) -> None:
    proxy, opening = place
    trainer = Trainer(opening(), models.plain_model()).attach()
    trainer.step(1)
    store = opening()
    tensors = models.tensors_of(trainer.model)
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
        eventually(lambda: held == [1])
        FAULTS[fault](proxy)
        trainer.step(2)  # warns where it cannot publish
        if not fault.startswith("swallowed"):
            eventually(lambda: bool(troubles))
        assert following.is_alive()
        proxy.reset()
        trainer.step(3)
        eventually(lambda: bool(held) and held[-1] == trainer.publisher.version)
    finally:
        proxy.reset()
        stop.set()
        following.join()
        trainer.publisher.close()
    assert all(error.retryable for error in troubles)
    assert models.same(models.bits_of(tensors), models.bits_of(trainer.model))
