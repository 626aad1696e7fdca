import logging
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from unittest import mock

import pytest

from deltachain.chain.chain import Committed
from deltachain.errors import (
    ChainMismatchError,
    DeltaChainError,
    NoVersionError,
    PartialApplyError,
    StoreError,
    TensorMismatchError,
)
from deltachain.format import keys
from deltachain.subscribe import ApplyReceipt, Subscriber, fetch_around, follow_loop
from deltachain.subscribe.follow_loop import NEEDS_A_PERSON
from tests.support.faults import Fault
from tests.support.models import plain_model
from tests.support.values import eventually
from tests.unit.manifest_chains import WideStore
from tests.unit.subscribe.accidents import Run, nothing, versions
from tests.unit.subscribe.clock import Clock


@pytest.fixture
def subscriber(run: Run) -> Subscriber:
    """Holds nothing."""
    return run.subscribe(run.zeros, on=run.faulty)


# The ordinary course


def test_versions_are_applied_as_they_are_committed(run: Run, clock: Clock) -> None:
    run.publish(1)
    clock.happens = [lambda: run.publish(2), lambda: run.publish(3, 4, 5)]
    found = versions(clock.run())
    assert found == [(None, 1), (1, 2), (2, 3), (3, 5)]  # the next, then all that wait
    assert len(clock.waits) == 3
    assert run.matches(run.zeros)


def test_every_version_can_be_applied_on_its_own(run: Run, clock: Clock) -> None:
    run.publish(1)
    clock.happens = [lambda: run.publish(2, 3, 4)]
    found = clock.run(every_version=True)
    assert versions(found) == [(None, 1), (1, 2), (2, 3), (3, 4)]


def test_a_look_at_a_chain_that_stands_still_asks_for_one_thing(run: Run, clock: Clock) -> None:
    run.publish(1)
    clock.subscriber.update()
    run.faulty.keys_read.clear()
    clock.happens = [nothing] * 5
    assert clock.run() == []
    assert run.faulty.keys_read == []
    assert len(clock.waits) == 6


def test_a_trainer_that_comes_later_is_waited_for(
    run: Run, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    hidden: dict[str, bytes] = {}
    said: list[DeltaChainError | None] = []
    follower = clock.subscriber

    def begin() -> None:  # the identity is put before the first version
        run.publish()
        for info in list(run.store.list("manifests/")):
            hidden[info.key] = run.store.get(info.key)
            run.store.delete(info.key)

    def commit() -> None:
        assert follower.times.looked_at  # an answer, and no silence
        with pytest.raises(NoVersionError, match="wait for the publisher's first commit"):
            follower.update()
        for key, data in hidden.items():
            run.store.put(key, data)

    clock.happens = [*[nothing] * 6, begin, *[nothing] * 6, commit]
    receipts = follower.follow(stop=clock.stop, looked=said.append)
    assert versions(list(receipts)) == [(None, 0)]
    assert run.matches(run.zeros)
    assert len(clock.waits) == 15
    assert max(clock.waits) < 1.5 * follower.poll_s
    assert set(said) == {None}
    (line,) = (one for one in caplog.records if one.name == follow_loop.__name__)
    assert (line.levelno, "waiting for the first" in line.message) == (logging.INFO, True)


def test_a_word_from_outside_ends_the_wait(run: Run) -> None:
    run.publish(1)
    subscriber = run.subscribe(run.zeros, poll_s=3600.0)
    stop, applied = Event(), Event()
    found: list[ApplyReceipt] = []

    def follow() -> None:
        for receipt in subscriber.follow(stop=stop):
            found.append(receipt)
            applied.set()

    thread = Thread(target=follow)
    thread.start()
    for seed in (2, 3):
        assert applied.wait(60)
        applied.clear()
        run.publish(seed)
        subscriber.notify()
    assert applied.wait(60)
    stop.set()
    subscriber.notify()
    thread.join(60)
    assert versions(found) == [(None, 1), (1, 2), (2, 3)]
    assert run.matches(run.zeros)


@pytest.mark.parametrize("failing", [False, True])
def test_the_head_goes_on_while_a_target_hangs(
    run: Run, subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch, failing: bool
) -> None:
    monkeypatch.setattr(fetch_around, "LEAST_LOOK_S", 0.01)
    run.publish()
    chain, stage = subscriber.chain, subscriber.target.stage
    newest = chain.newest
    looks: list[int] = []

    def look(known: int) -> int:
        looks.append(known)
        if failing and len(looks) in (2, 3):
            raise StoreError("the store is away")
        return newest(known)

    def hang(*given: object, **settings: object) -> object:
        run.publish(1)
        eventually(lambda: chain.latest == 1)  # though the target hangs
        return stage(*given, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(chain, "newest", look)
    monkeypatch.setattr(subscriber.target, "stage", hang)
    receipt = subscriber.update(0)
    assert receipt is not None
    assert receipt.version == 0
    assert len(looks) > (3 if failing else 1)
    count = len(looks)
    time.sleep(0.1)
    assert len(looks) == count  # none once the version is staged


@pytest.mark.parametrize("late", [False, True])
def test_one_wide_look_serves_a_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    store = WideStore()
    run = Run(store, tmp_path)
    run.publish()
    with run.join(run.zeros, 0, poll_s=60.0) as subscriber:
        run.publish(1)
        monkeypatch.setattr(fetch_around, "LEAST_LOOK_S", 0.0 if late else 60.0)
        store.looks.clear()
        receipt = next(subscriber.follow(stop=Event()))
        asked = [look for look in store.looks if keys.manifest_key(2) in look]
    run.close()
    assert (receipt.version, receipt.lag_versions) == (1, 0)
    assert len(asked) == (2 if late else 1)


# A rollback meanwhile


@pytest.mark.parametrize("every_version", [False, True])
def test_a_rollback_in_the_middle_of_a_look_is_not_undone(
    run: Run, subscriber: Subscriber, clock: Clock, *, every_version: bool
) -> None:
    for seed in (1, 2):
        run.publish(seed)
        subscriber.update()
    run.publish(3, 4)
    find = subscriber.chain.find

    def overtaken(version: int) -> Committed | None:
        found = find(version)
        patched.stop()
        subscriber.rollback(1)
        return found

    patched = mock.patch.object(subscriber.chain, "find", overtaken)
    patched.start()
    clock.happens = [nothing] * 3
    assert clock.run(every_version=every_version) == []
    assert (subscriber.version, subscriber.pinned) == (1, True)


# What it heals from


def test_a_store_that_is_down_for_a_while(
    run: Run, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    run.publish(1)

    def go_down() -> None:
        run.faulty.down = True

    clock.happens = [go_down, *[nothing] * 4, lambda: run.publish(2), run.faulty.mend]
    assert versions(clock.run()) == [(None, 1), (1, 2)]
    assert run.matches(run.zeros)
    assert caplog.text.count("the store is down") == 1  # once, not once a look
    base = clock.subscriber.poll_s
    assert clock.waits[0] < 1.5 * base < clock.waits[4]  # ever more slowly
    assert clock.waits[-1] < 1.5 * base  # and back


@pytest.mark.parametrize("every_version", [False, True])
def test_an_object_that_stays_corrupt_until_an_anchor_leads_around_it(
    run: Run, clock: Clock, *, every_version: bool
) -> None:
    run.publish(1)

    def anchor() -> None:
        run.publish(3, 4)
        run.add_anchor()
        run.publish(5)

    run.faulty.add(Fault("corrupt", f"deltas/{2:020d}", times=None))
    clock.happens = [lambda: run.publish(2), anchor]
    found = versions(clock.run(every_version=every_version))
    assert (found[0], found[-1][1]) == ((None, 1), 5)
    assert run.matches(run.zeros)


def test_a_foreign_write(run: Run, clock: Clock) -> None:
    run.publish(1)

    def scribble() -> None:
        for name in ("layer.weight", "embed.weight", "head.weight"):
            run.zeros[name].fill_(3.0)
        run.publish(2, share=0.5)

    clock.happens = [scribble, nothing]
    assert versions(clock.run()) == [(None, 1), (None, 2)]
    assert run.matches(run.zeros)
    assert clock.subscriber.scrub()


def test_a_swap_that_was_taken_back(
    run: Run, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.publish(1)
    swap = clock.subscriber.target.swap
    failures = [PartialApplyError("taken back")]

    def flaky(patches: Iterator[object], held: object) -> None:
        if failures:
            raise failures.pop()
        swap(patches, held)  # type: ignore[arg-type]

    def break_and_publish() -> None:
        monkeypatch.setattr(clock.subscriber.target, "swap", flaky)
        run.publish(2)

    clock.happens = [break_and_publish, nothing]
    assert versions(clock.run()) == [(None, 1), (1, 2)]
    assert failures == []
    assert run.matches(run.zeros)


# What only a person can resolve


def test_a_target_of_another_model_ends_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.publish()
    subscriber = run.subscribe(plain_model())
    clock = Clock(subscriber, monkeypatch)
    with pytest.raises(TensorMismatchError):
        clock.run()
    assert clock.waits == []
    assert ChainMismatchError in NEEDS_A_PERSON
