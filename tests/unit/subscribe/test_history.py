"""Chains that are not the one that led to what is held."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from torch import Tensor

from deltachain.chain.chain import Chain
from deltachain.errors import (
    BrokenChainError,
    ChainError,
    ForkedChainError,
    ObjectNotFoundError,
    StoreWentBackError,
    TensorMismatchError,
)
from deltachain.format.documents import seal
from deltachain.format.keys import HEAD_KEY, manifest_key
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import MemoryStore
from deltachain.subscribe import Subscriber
from tests.support.models import Replica, TinyModel, bits_of, same, tensors_of, train_

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
