from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from torch import Tensor

from deltachain.chain.chain import Chain
from deltachain.errors import (
    BaseMismatchError,
    BrokenChainError,
    ChainError,
    ForkedChainError,
    ObjectNotFoundError,
    PartialApplyError,
    PoisonedError,
    StoreUnavailableError,
    StoreWentBackError,
    TensorMismatchError,
)
from deltachain.format.documents import seal
from deltachain.format.keys import HEAD_KEY, manifest_key
from deltachain.publish import PublishConfig, Publisher
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
    tensors_of,
    train_,
)
from tests.support.values import present


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
    replica: Replica, subscribe: Subscribe, truth: list[State], monkeypatch: pytest.MonkeyPatch
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


Publish = Callable[..., None]
Subscribe = Callable[..., Subscriber]


@pytest.fixture
def subscriber(zeros: dict[str, Tensor], subscribe: Subscribe, publish: Publish) -> Subscriber:
    """Holds version 2 of 2."""
    publish(1, 2)
    subscriber = subscribe(zeros)
    subscriber.update()
    return subscriber


def copy_chain(store: MemoryStore, *, up_to: int) -> MemoryStore:
    """The same chain as it was when ``up_to`` was its head."""
    earlier = MemoryStore()
    for info in store.list():
        if not any(info.key == manifest_key(version) for version in range(up_to + 1, 100)):
            earlier.put(info.key, store.get(info.key))
    earlier.delete(HEAD_KEY)
    return earlier


def replace(store: MemoryStore, other: MemoryStore) -> None:
    """Somebody copies another chain over this one."""
    for info in list(store.list()):
        store.delete(info.key)
    for info in other.list():
        store.put(info.key, other.get(info.key))


def refuses(subscriber: Subscriber, zeros: dict[str, Tensor]) -> None:
    before = bits_of(zeros)
    with pytest.raises(ForkedChainError) as caught:
        subscriber.update()
    assert "two histories" in caught.value.hint
    assert same(bits_of(zeros), before)


def test_a_missing_manifest_is_named(
    subscriber: Subscriber, store: MemoryStore, publish: Publish, zeros: dict[str, Tensor]
) -> None:
    publish(3, 4, 5)
    Chain.open(store).write_head(5, ())
    store.delete(manifest_key(3))
    before = bits_of(zeros)
    with pytest.raises(BrokenChainError, match="manifest of version 3 is missing, head is 5"):
        subscriber.update(3)
    with pytest.raises((BrokenChainError, ObjectNotFoundError), match=manifest_key(3)):
        subscriber.update()
    assert same(bits_of(zeros), before)
    chain = Chain.open(store)
    with pytest.raises(BrokenChainError, match="manifest of version 3 is missing"):
        list(chain.history(0, 5))


def fork_at(store: MemoryStore, version: int, *, steps: int) -> None:
    """Rewrite history from ``version`` on, by a publisher that restarted on an older copy."""
    other = copy_chain(store, up_to=version - 1)
    model = TinyModel()
    for step in range(1, version):
        train_(model, step, share=0.02)
    with Publisher(PublishConfig(url=other.url), store=other).attach(model) as publisher:
        for step in range(steps):
            train_(model, 1000 + step)
            publisher.publish()
            publisher.flush()
    replace(store, other)


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_fork_of_what_is_held_is_refused(
    subscriber: Subscriber, store: MemoryStore, zeros: dict[str, Tensor], steps: int
) -> None:
    fork_at(store, 2, steps=steps)
    refuses(subscriber, zeros)
    assert subscriber.version == 2


def test_a_fork_is_refused_while_poisoned(
    subscriber: Subscriber, store: MemoryStore, zeros: dict[str, Tensor]
) -> None:
    fork_at(store, 2, steps=3)
    zeros["layer.weight"].view(-1)[0] = 7.0
    assert not subscriber.scrub()
    refuses(subscriber, zeros)


def test_another_parent_of_the_next_version_is_refused(
    subscriber: Subscriber, store: MemoryStore, publish: Publish, zeros: dict[str, Tensor]
) -> None:
    publish(3)
    chain = Chain.open(store)
    manifest = msgspec.structs.replace(chain.read(3).manifest, parent="0" * 64)
    store.put(manifest_key(3), seal(manifest))
    refuses(subscriber, zeros)


def test_a_lower_epoch_is_refused(
    store: MemoryStore, model: TinyModel, subscribe: Subscribe, publish: Publish
) -> None:
    publish(1)
    with Publisher(PublishConfig(url=store.url), store=store).attach(model) as publisher:
        for step in (2, 3, 4):
            train_(model, step)
            publisher.publish()
            publisher.flush()
    zeros = tensors_of(model)
    subscriber = subscribe(zeros)
    subscriber.update(2)
    chain = Chain.open(store)
    assert chain.read(5).manifest.epoch == 1
    store.put(manifest_key(5), seal(msgspec.structs.replace(chain.read(5).manifest, epoch=0)))
    before = bits_of(zeros)
    with pytest.raises(ForkedChainError, match="version 5 is of epoch 0, older than the held 1"):
        subscriber.update()
    assert same(bits_of(zeros), before)


def test_a_chain_that_went_back_in_time_is_not_followed(
    subscriber: Subscriber, store: MemoryStore, zeros: dict[str, Tensor]
) -> None:
    replace(store, copy_chain(store, up_to=1))
    before = bits_of(zeros)
    with pytest.raises(StoreWentBackError, match="version 2 is held, the newest there is 1"):
        subscriber.update()
    assert same(bits_of(zeros), before)


def test_a_chain_that_went_back_in_time_does_not_heal(
    subscriber: Subscriber, store: MemoryStore, zeros: dict[str, Tensor]
) -> None:
    replace(store, copy_chain(store, up_to=1))
    zeros["layer.weight"].view(-1)[0] = 7.0
    assert not subscriber.scrub()
    with pytest.raises(StoreWentBackError, match="version 2 is held, the newest there is 1"):
        subscriber.update()
    assert subscriber.version is None


def test_a_chain_without_versions_is_waited_for(
    subscribe: Subscribe, store: MemoryStore, publish: Publish, zeros: dict[str, Tensor]
) -> None:
    publish(1)
    for info in list(store.list("manifests/")):
        store.delete(info.key)
    with pytest.raises(ChainError, match="no version yet") as caught:
        subscribe(zeros).update()
    assert "wait" in caught.value.hint


def test_a_chain_that_is_gone_is_said_to_be(
    store: MemoryStore, subscribe: Subscribe, publish: Publish, model: TinyModel
) -> None:
    publish(1)
    subscriber = subscribe(tensors_of(model))
    subscriber.update()
    for info in list(store.list("")):
        store.delete(info.key)
    for version in (None, 2):
        with pytest.raises(ObjectNotFoundError, match="the chain that was at memory:"):
            subscriber.update(version)
    assert subscriber.version == 1


def test_a_folder_that_followed_another_chain_joins_from_nothing(
    subscribe: Subscribe, publish: Publish, model: TinyModel, replica: Replica
) -> None:
    publish(1)
    subscribe(replica).update()
    other = MemoryStore()
    trained = TinyModel(seed=3)
    with Publisher(PublishConfig(url=other.url), store=other).attach(trained):
        subscriber = subscribe(replica.target, on=other)
        assert subscriber.version is None
        receipt = subscriber.update()
    assert receipt is not None
    assert receipt.previous is None
    assert same(replica.bits(), bits_of(trained))
    assert not same(replica.bits(), bits_of(model))


def test_the_chain_of_another_model_is_refused(
    subscriber: Subscriber, subscribe: Subscribe, replica: Replica
) -> None:
    assert subscriber.version == 2
    subscribe(replica).update()
    other = MemoryStore()
    with Publisher(PublishConfig(url=other.url), store=other).attach(TinyModel(width=32)):
        before = replica.bits()
        with pytest.raises(TensorMismatchError):
            subscribe(replica.target, on=other).update()
        assert same(replica.bits(), before)
