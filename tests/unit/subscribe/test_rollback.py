from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deltachain.errors import (
    BaseMismatchError,
    ChainError,
    PartialApplyError,
    PoisonedError,
    StoreUnavailableError,
)
from deltachain.publish import Publisher
from deltachain.store import MemoryStore
from deltachain.subscribe import Subscriber
from deltachain.subscribe import subscriber as module
from tests.support.faults import Fault, FaultyStore
from tests.support.models import (
    Replica,
    State,
    TinyModel,
    bits_of,
    same,
    scribble,
)
from tests.support.values import present

Publish = Callable[..., None]
Subscribe = Callable[..., Subscriber]


@pytest.fixture
def truth(publisher: Publisher, publish: Publish, model: TinyModel) -> list[State]:
    """The bits of versions 0 to 4."""
    assert publisher.version == 0
    states: list[State] = [bits_of(model)]
    for step in range(1, 5):
        publish(step)
        states.append(bits_of(model))
    return states


def at_head(subscriber: Subscriber) -> Subscriber:
    """Holds version 4 after one apply a version."""
    for version in range(5):
        subscriber.update(version)
    return subscriber


def test_a_replica_that_holds_nothing_has_nothing_to_go_back_to(
    replica: Replica, subscribe: Subscribe, truth: list[State]
) -> None:
    with pytest.raises(ChainError, match="cannot roll back from version None"):
        subscribe(replica).rollback()
    subscriber = subscribe(replica)
    subscriber.update()
    with pytest.raises(ChainError, match="name an older version"):
        subscriber.rollback()
    assert same(replica.bits(), truth[4])
    assert not subscriber.pinned


def test_a_newer_version_is_no_rollback(
    replica: Replica, subscribe: Subscribe, truth: list[State]
) -> None:
    subscriber = subscribe(replica)
    subscriber.update(2)
    with pytest.raises(ChainError, match="from version 2 to 3"):
        subscriber.rollback(3)
    assert same(replica.bits(), truth[2])


def test_applies_are_taken_back_without_the_store(
    replica: Replica, subscribe: Subscribe, truth: list[State], store: MemoryStore
) -> None:
    faulty = FaultyStore(store)
    subscriber = at_head(subscribe(replica, on=faulty, undo_applies=3))
    faulty.down = True
    assert subscriber.rollback().version == 3
    assert same(replica.bits(), truth[3])
    assert subscriber.version == 3
    assert subscriber.scrub()
    assert subscriber.rollback(1).version == 1
    assert same(replica.bits(), truth[1])


def test_an_apply_that_folded_versions_is_taken_back_whole(
    replica: Replica, subscribe: Subscribe, truth: list[State]
) -> None:
    subscriber = subscribe(replica)
    subscriber.update(1)
    subscriber.update(4)
    assert subscriber.rollback().version == 1
    assert same(replica.bits(), truth[1])


@pytest.mark.parametrize("settings", [{"undo_applies": 1}, {"undo_applies": 0}])
def test_what_is_no_longer_remembered_is_planned_from_the_store(
    replica: Replica, subscribe: Subscribe, truth: list[State], settings: dict[str, int]
) -> None:
    subscriber = at_head(subscribe(replica, **settings))
    assert subscriber.rollback(1).version == 1
    assert same(replica.bits(), truth[1])
    with pytest.raises(ChainError):
        subscriber.rollback()  # the applies before are no way back from here


def test_what_is_too_large_to_remember_is_planned_from_the_store(
    replica: Replica, subscribe: Subscribe, truth: list[State], store: MemoryStore
) -> None:
    faulty = FaultyStore(store)
    subscriber = at_head(subscribe(replica, on=faulty, stage_budget=100))
    faulty.down = True
    with pytest.raises(StoreUnavailableError):
        subscriber.rollback(3)
    assert not subscriber.pinned
    faulty.mend()
    assert subscriber.rollback(3).version == 3
    assert same(replica.bits(), truth[3])


def test_a_version_between_two_applies_is_planned_from_the_store(
    replica: Replica, subscribe: Subscribe, truth: list[State]
) -> None:
    subscriber = subscribe(replica)
    subscriber.update(0)
    subscriber.update(4)
    assert subscriber.rollback(2).version == 2
    assert same(replica.bits(), truth[2])


def test_a_rollback_pins_until_it_is_released(
    replica: Replica, subscribe: Subscribe, truth: list[State]
) -> None:
    subscriber = at_head(subscribe(replica))
    subscriber.rollback()
    assert subscriber.pinned
    assert subscriber.status().pinned
    assert subscriber.update() is None
    assert same(replica.bits(), truth[3])
    subscriber.release()
    receipt = present(subscriber.update())
    assert (receipt.previous, receipt.version) == (3, 4)
    assert same(replica.bits(), truth[4])
    assert subscriber.rollback().version == 3
    assert same(replica.bits(), truth[3])


def test_a_rollback_to_what_is_held_pins_alone(
    replica: Replica, subscribe: Subscribe, truth: list[State]
) -> None:
    subscriber = at_head(subscribe(replica))
    assert subscriber.rollback(4).version == 4
    assert subscriber.pinned
    assert same(replica.bits(), truth[4])


def test_a_pinned_target_goes_nowhere_until_it_is_released(
    replica: Replica, subscribe: Subscribe, truth: list[State]
) -> None:
    """A trainer that pushes every version by its number would undo every rollback."""
    subscriber = subscribe(replica)
    for version in range(4):
        subscriber.update(version)
    subscriber.rollback(2)
    for version in (3, 4):
        with pytest.raises(ChainError, match="keeps this target at version 2"):
            subscriber.update(version)
    assert subscriber.update() is None
    assert subscriber.update(2) is None
    assert same(replica.bits(), truth[2])
    subscriber.release()
    subscriber.update(4)
    assert same(replica.bits(), truth[4])


def test_what_was_staged_before_a_pin_does_not_lead_away_from_it(
    replica: Replica, subscribe: Subscribe, truth: list[State]
) -> None:
    subscriber = subscribe(replica)
    subscriber.update(2)
    staged = present(subscriber.stage())
    subscriber.rollback(2)
    with pytest.raises(BaseMismatchError, match="version 4 was staged before another swap"):
        subscriber.swap(staged)
    assert same(replica.bits(), truth[2])


@pytest.mark.parametrize("moment", ["require", "fetch_around"])
def test_a_rollback_in_the_middle_of_a_stage_poisons_nobody(
    replica: Replica,
    subscribe: Subscribe,
    truth: list[State],
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    """What is staged is then compared with bits that it was not meant for."""
    subscriber = subscribe(replica)
    for version in range(3):
        subscriber.update(version)
    original = getattr(module, moment)

    def overtaken(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.undo()
        assert subscriber.rollback().version == 1
        return original(*args, **kwargs)

    monkeypatch.setattr(module, moment, overtaken)
    with pytest.raises(BaseMismatchError, match="version 4 was staged before another swap"):
        subscriber.update()
    assert not subscriber.poisoned
    assert subscriber.pinned
    assert same(replica.bits(), truth[1])
    subscriber.release()
    subscriber.update()
    assert same(replica.bits(), truth[4])


def test_a_pinned_replica_heals_where_it_is_pinned(
    replica: Replica, subscribe: Subscribe, truth: list[State]
) -> None:
    subscriber = at_head(subscribe(replica))
    subscriber.rollback(2)
    subscriber.poisoned = True
    receipt = present(subscriber.update())
    assert (receipt.previous, receipt.version) == (None, 2)
    assert subscriber.pinned
    assert same(replica.bits(), truth[2])


def test_bits_that_nobody_proved_are_not_gone_back_to(
    replica: Replica,
    subscribe: Subscribe,
    publish: Publish,
    model: TinyModel,
    store: MemoryStore,
    add_anchor: Callable[[], None],
) -> None:
    publish(1)
    faulty = FaultyStore(store, Fault("hide", "deltas/00000000000000000002", times=None))
    subscriber = subscribe(replica, on=faulty)
    subscriber.update()
    at_one = replica.bits()
    scribble(replica)  # unnoticed, and overwritten by an anchor that needs no base
    publish(2)
    add_anchor()
    subscriber.update()
    assert same(replica.bits(), bits_of(model))
    assert subscriber.rollback(1).version == 1
    assert same(replica.bits(), at_one)


def test_a_rollback_that_failed_leaves_the_way_back_as_it_was(
    replica: Replica,
    subscribe: Subscribe,
    truth: list[State],
    store: MemoryStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faulty = FaultyStore(store)
    subscriber = at_head(subscribe(replica, on=faulty))
    faulty.down = True

    def refuse(*_: object) -> None:
        raise PartialApplyError("taken back")

    with monkeypatch.context() as patched:
        patched.setattr(subscriber.target, "swap", refuse)
        with pytest.raises(PartialApplyError):
            subscriber.rollback(2)
    assert (subscriber.version, subscriber.pinned) == (4, False)
    assert same(replica.bits(), truth[4])
    assert subscriber.rollback(2).version == 2
    assert same(replica.bits(), truth[2])


def test_a_rollback_that_poisoned_leaves_no_way_back(
    replica: Replica,
    subscribe: Subscribe,
    truth: list[State],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subscriber = at_head(subscribe(replica))

    def break_down(*_: object) -> None:
        raise PoisonedError("half written")

    with monkeypatch.context() as patched:
        patched.setattr(subscriber.target, "swap", break_down)
        with pytest.raises(PoisonedError):
            subscriber.rollback()
    assert subscriber.poisoned
    with pytest.raises(ChainError, match="from version None"):
        subscriber.rollback()
    receipt = present(subscriber.update())
    assert (receipt.previous, receipt.version) == (None, 4)
    assert same(replica.bits(), truth[4])
