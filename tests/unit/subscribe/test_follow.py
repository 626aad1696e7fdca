import time
from collections.abc import Callable, Iterator
from threading import Event, Thread
from unittest import mock

import pytest
from torch import Tensor

from deltachain.chain.chain import Committed
from deltachain.errors import ChainMismatchError, PartialApplyError, StoreError, TensorMismatchError
from deltachain.format import keys
from deltachain.publish import Publisher
from deltachain.store import MemoryStore
from deltachain.subscribe import ApplyReceipt, SubscribeConfig, Subscriber, fetch
from deltachain.subscribe.follow_loop import NEEDS_A_PERSON
from deltachain.subscribe.subscriber import LOOK_BACK
from tests.support.faults import Fault, FaultyStore
from tests.support.models import TinyModel, bits_of, plain_model, same, tensors_of, train_
from tests.support.values import eventually
from tests.unit.manifest_chains import WideStore
from tests.unit.subscribe.clock import Clock


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TinyModel, Publisher, Subscriber]]:
    monkeypatch.setattr(fetch, "LEAST_LOOK_S", 0.01)
    store, model = MemoryStore(), TinyModel()
    config = SubscribeConfig(url="memory://ahead", poll_s=0.01)
    with (
        Publisher("memory://ahead", store=store).attach(model) as publisher,
        Subscriber(config, tensors_of(TinyModel(seed=1)), store=store) as subscriber,
    ):
        yield model, publisher, subscriber


@pytest.mark.parametrize("failing", [False, True])
def test_the_head_goes_on_while_a_target_hangs(
    parts: tuple[TinyModel, Publisher, Subscriber], failing: bool
) -> None:
    model, publisher, subscriber = parts
    chain, stage = subscriber.chain, subscriber.target.stage
    newest = chain.newest
    looks: list[int] = []

    def look(known: int) -> int:
        looks.append(known)
        if failing and len(looks) in (2, 3):
            raise StoreError("the store is away")
        return newest(known)

    def hang(*given: object, **settings: object) -> object:
        train_(model, seed=1)
        publisher.publish(step=1)
        publisher.flush()
        eventually(lambda: chain.latest == 1)  # though the target hangs
        return stage(*given, **settings)  # type: ignore[arg-type]

    with (
        mock.patch.object(chain, "newest", look),
        mock.patch.object(subscriber.target, "stage", hang),
    ):
        receipt = subscriber.update(0)
    assert receipt is not None
    assert receipt.version == 0
    assert len(looks) > (3 if failing else 1)
    count = len(looks)
    time.sleep(0.1)
    assert len(looks) == count  # none once the version is staged


@pytest.mark.parametrize("late", [False, True])
def test_one_wide_look_serves_a_version(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    store, model, stop = WideStore(), TinyModel(), Event()
    with (
        Publisher("memory://wide", store=store).attach(model) as publisher,
        Subscriber(SubscribeConfig(url="memory://wide"), tensors_of(model), store=store) as held,
    ):
        held.update(0)
        train_(model, seed=1)
        publisher.publish(step=1)
        publisher.flush()
        monkeypatch.setattr(fetch, "LEAST_LOOK_S", 0.0 if late else 60.0)
        store.looks.clear()
        receipt = next(held.follow(stop=stop))
        asked = [look for look in store.looks if keys.manifest_key(2) in look]
    assert (receipt.version, receipt.lag_versions) == (1, 0)
    assert len(asked) == (2 if late else 1)


Publish = Callable[..., None]
Subscribe = Callable[..., Subscriber]


@pytest.fixture
def subscriber(zeros: dict[str, Tensor], subscribe: Subscribe, faulty: FaultyStore) -> Subscriber:
    return subscribe(zeros, on=faulty)


def versions(receipts: list[ApplyReceipt]) -> list[tuple[int | None, int]]:
    return [(receipt.previous, receipt.version) for receipt in receipts]


# The ordinary course


def test_versions_are_applied_as_they_are_committed(
    subscriber: Subscriber, publish: Publish, clock: Clock, zeros: dict[str, Tensor]
) -> None:
    publish(1)
    clock.happens = [lambda: publish(2), lambda: publish(3, 4, 5)]
    found = versions(clock.run(subscriber))
    assert found == [(None, 1), (1, 2), (2, 3), (3, 5)]  # the next, then all that wait
    assert len(clock.waits) == 3
    assert any(bits.any() for bits in bits_of(zeros).values())


def test_every_version_can_be_applied_on_its_own(
    subscriber: Subscriber, publish: Publish, clock: Clock
) -> None:
    publish(1)
    clock.happens = [lambda: publish(2, 3, 4)]
    found = clock.run(subscriber, every_version=True)
    assert versions(found) == [(None, 1), (1, 2), (2, 3), (3, 4)]


def test_a_look_at_a_chain_that_stands_still_asks_for_one_thing(
    subscriber: Subscriber, publish: Publish, clock: Clock, faulty: FaultyStore
) -> None:
    publish(1)
    subscriber.update()
    faulty.keys_read.clear()
    clock.happens = [lambda: None] * 5
    assert clock.run(subscriber) == []
    assert faulty.keys_read == []
    assert len(clock.waits) == 6


def test_a_trainer_that_comes_later_is_waited_for(
    subscribe: Subscribe, zeros: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = MemoryStore()
    subscriber = subscribe(zeros, on=empty)
    clock = Clock(subscriber, monkeypatch)
    clock.happens = [lambda: None, lambda: None]
    assert clock.run(subscriber) == []
    assert len(clock.waits) == 3


@pytest.mark.parametrize("every_version", [False, True])
def test_a_rollback_in_the_middle_of_a_look_is_not_undone(
    subscriber: Subscriber,
    publish: Publish,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    *,
    every_version: bool,
) -> None:
    publish(1)
    subscriber.update()
    publish(2)
    subscriber.update()
    publish(3, 4)
    find = subscriber.chain.find

    def overtaken(version: int) -> Committed | None:
        found = find(version)
        monkeypatch.undo()
        monkeypatch.setattr(subscriber.told, "wait", clock.wait)
        subscriber.rollback(1)
        return found

    monkeypatch.setattr(subscriber.chain, "find", overtaken)
    clock.happens = [lambda: None] * 3
    assert clock.run(subscriber, every_version=every_version) == []
    assert (subscriber.version, subscriber.pinned) == (1, True)


def test_a_word_from_outside_ends_the_wait(
    subscribe: Subscribe, zeros: dict[str, Tensor], publish: Publish, model: TinyModel
) -> None:
    publish(1)
    subscriber = subscribe(zeros, poll_s=3600.0)
    stop, applied = Event(), Event()
    found: list[ApplyReceipt] = []

    def run() -> None:
        for receipt in subscriber.follow(stop=stop):
            found.append(receipt)
            applied.set()

    thread = Thread(target=run)
    thread.start()
    for seed in (2, 3):
        assert applied.wait(60)
        applied.clear()
        publish(seed)
        subscriber.notify()
    assert applied.wait(60)
    stop.set()
    subscriber.notify()
    thread.join(60)
    assert versions(found) == [(None, 1), (1, 2), (2, 3)]
    assert same(bits_of(zeros), bits_of(model))


# What it heals from


def test_a_store_that_is_down_for_a_while(
    subscriber: Subscriber,
    publish: Publish,
    clock: Clock,
    faulty: FaultyStore,
    zeros: dict[str, Tensor],
    model: TinyModel,
    *,
    caplog: pytest.LogCaptureFixture,
) -> None:
    publish(1)

    def go_down() -> None:
        faulty.down = True

    clock.happens = [go_down, *[lambda: None] * 4, lambda: publish(2), faulty.mend]
    assert versions(clock.run(subscriber)) == [(None, 1), (1, 2)]
    assert same(bits_of(zeros), bits_of(model))
    assert caplog.text.count("the store is down") == 1  # once, not once a look
    base = subscriber.poll_s
    assert clock.waits[0] < 1.5 * base < clock.waits[4]  # ever more slowly
    assert clock.waits[-1] < 1.5 * base  # and back


def test_a_chain_that_is_gone_for_a_while(
    subscriber: Subscriber, publish: Publish, clock: Clock, store: MemoryStore
) -> None:
    """Its store answers: a folder that is not mounted looks like one where nothing is new."""
    publish(1)
    away = {info.key: store.get(info.key) for info in store.list("")}
    troubles: list[str] = []

    def vanish() -> None:
        for key in away:
            store.delete(key)

    def come_back() -> None:
        for key, data in away.items():
            store.put(key, data)
        publish(2)

    clock.happens = [vanish, *[lambda: None] * (LOOK_BACK + 3), come_back]
    looks = subscriber.follow(
        stop=clock.stop, looked=lambda exc: troubles.append(str(exc) if exc else "")
    )
    assert versions(list(looks)) == [(None, 1), (1, 2)]
    told = ["is lost: chain.json is gone" in trouble for trouble in troubles]
    assert told == [False] * (LOOK_BACK - 1) + [True] * 5 + [False]
    assert troubles[-1] == ""


def test_an_object_that_is_corrupt_for_a_while(
    subscriber: Subscriber,
    publish: Publish,
    clock: Clock,
    faulty: FaultyStore,
    zeros: dict[str, Tensor],
    model: TinyModel,
) -> None:
    publish(1)
    prefix = f"deltas/{2:020d}"
    faulty.add(Fault("corrupt", prefix, times=None), Fault("corrupt", "anchors/", nth=2, times=6))
    clock.happens = [lambda: publish(2), lambda: None, faulty.mend]
    assert versions(clock.run(subscriber)) == [(None, 1), (1, 2)]
    assert same(bits_of(zeros), bits_of(model))


@pytest.mark.parametrize("every_version", [False, True])
def test_an_object_that_stays_corrupt_until_an_anchor_leads_around_it(
    subscriber: Subscriber,
    publish: Publish,
    clock: Clock,
    faulty: FaultyStore,
    zeros: dict[str, Tensor],
    model: TinyModel,
    *,
    add_anchor: Callable[[], None],
    every_version: bool,
) -> None:
    publish(1)

    def anchor() -> None:
        publish(3, 4)
        add_anchor()
        publish(5)

    faulty.add(Fault("corrupt", f"deltas/{2:020d}", times=None))
    clock.happens = [lambda: publish(2), anchor]
    found = versions(clock.run(subscriber, every_version=every_version))
    assert (found[0], found[-1][1]) == ((None, 1), 5)
    assert same(bits_of(zeros), bits_of(model))


def test_a_foreign_write(
    subscriber: Subscriber,
    publish: Publish,
    clock: Clock,
    zeros: dict[str, Tensor],
    model: TinyModel,
) -> None:
    publish(1)

    def scribble() -> None:
        for name in ("layer.weight", "embed.weight", "head.weight"):
            zeros[name].fill_(3.0)
        publish(2, share=0.5)

    clock.happens = [scribble, lambda: None]
    assert versions(clock.run(subscriber)) == [(None, 1), (None, 2)]
    assert same(bits_of(zeros), bits_of(model))
    assert subscriber.scrub()


def test_a_swap_that_was_taken_back(
    subscriber: Subscriber,
    publish: Publish,
    clock: Clock,
    zeros: dict[str, Tensor],
    model: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publish(1)
    swap = subscriber.target.swap
    failures = [PartialApplyError("taken back")]

    def flaky(patches: Iterator[object], held: object) -> None:
        if failures:
            raise failures.pop()
        swap(patches, held)  # type: ignore[arg-type]

    clock.happens = [
        lambda: monkeypatch.setattr(subscriber.target, "swap", flaky),
        lambda: publish(2),
        lambda: None,
    ]
    assert versions(clock.run(subscriber)) == [(None, 1), (1, 2)]
    assert same(bits_of(zeros), bits_of(model))


def test_a_rollback_while_a_version_is_staged_does_not_poison(
    subscriber: Subscriber,
    publish: Publish,
    clock: Clock,
    zeros: dict[str, Tensor],
    model: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publish(1)
    subscriber.update()
    at_one = bits_of(model)
    publish(2)
    subscriber.update()
    publish(3)
    stage = subscriber.stage

    def stage_then_roll_back(version: int | None = None) -> object:
        staged = stage(version)
        if not subscriber.pinned:
            subscriber.rollback()
        return staged

    monkeypatch.setattr(subscriber, "stage", stage_then_roll_back)
    assert clock.run(subscriber) == []
    assert not subscriber.poisoned
    assert subscriber.version == 1
    assert same(bits_of(zeros), at_one)


# What only a person can resolve


@pytest.mark.usefixtures("publisher")
def test_a_target_of_another_model_ends_it(
    subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscriber = subscribe(plain_model())
    clock = Clock(subscriber, monkeypatch)
    with pytest.raises(TensorMismatchError):
        clock.run(subscriber)
    assert clock.waits == []
    assert ChainMismatchError in NEEDS_A_PERSON
