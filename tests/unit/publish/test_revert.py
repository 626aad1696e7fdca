"""A revert: followers go back, a publisher at work is fenced, one that starts must mean it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from deltachain.chain.chain import Chain
from deltachain.chain.fetch import Fetched
from deltachain.errors import (
    BrokenChainError,
    ChainError,
    ConfigError,
    DigestMismatchError,
    PublisherFencedError,
)
from deltachain.format.documents import Manifest, dump, revert_mark, reverted_to
from deltachain.format.keys import manifest_key, version_of
from deltachain.publish import Publisher
from deltachain.publish.revert import Reverted, revert
from deltachain.publish.writer import take_over
from deltachain.store import MemoryStore, Store
from deltachain.subscribe import SubscribeConfig, Subscriber
from deltachain.types import Buffer, StateDigest
from tests.support.faults import Fault, FaultyStore
from tests.support.models import TinyModel, recompute, replica_of, same, train_
from tests.support.values import present
from tests.unit.manifest_chains import SingleWriterStore
from tests.unit.publish.chains import Attach, assert_head_is, head_of, publish

T = TypeVar("T")


@pytest.fixture
def model() -> TinyModel:
    return TinyModel()


@pytest.fixture
def running(attach: Attach, model: TinyModel) -> Publisher:
    """A publisher of versions 0 to 6."""
    publisher = attach(model, anchor_factor=1000.0)
    publish(publisher, model, *range(1, 7))
    return publisher


@pytest.fixture
def closed(running: Publisher) -> None:
    running.close()


def back(store: Store, version: int, **settings: Any) -> Reverted:
    chain = Chain.open(store)
    return revert(chain, chain.read(version), **settings)


def head(store: Store) -> Manifest:
    return head_of(store).manifest


def older(step: int) -> TinyModel:
    """The model as it was after a step."""
    model = TinyModel()
    for done in range(1, step + 1):
        train_(model, done)
    return model


@pytest.mark.usefixtures("closed")
def test_the_head_has_the_old_bits_again(store: MemoryStore) -> None:
    done = back(store, 2)
    found = recompute(store)
    assert_head_is(older(2), 7, store)
    manifest = head(store)
    assert (manifest.version, manifest.epoch, manifest.step) == (7, 1, 2)
    assert (manifest.edge.kind, manifest.edge.base, reverted_to(manifest)) == ("delta", 6, 2)
    assert all(version_of(part.key) == 7 for part in manifest.edge.parts)
    changed = sum((found[6].state[n] != found[2].state[n]).sum() for n in found[2].state)
    assert done.nnz == manifest.nnz
    assert changed >= done.nnz > 0  # tied tensors count once
    assert back(store, 7).committed is back(store, 2).committed is None
    assert head(store).version == 7


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize("kind", ["dict", "module", "folder"])
def test_followers_go_back_and_stay_there_when_started_again(
    store: MemoryStore, model: TinyModel, tmp_path: Path, kind: str
) -> None:
    replica, truth = replica_of(model, kind, tmp_path / "held"), recompute(store)[2].state
    config = SubscribeConfig(url=store.url)
    with Subscriber(config, replica.target, store=store) as subscriber:
        subscriber.update()
        back(store, 2)
        receipt = present(subscriber.update())
        assert (receipt.version, receipt.previous) == (7, 6)
        assert same(replica.bits(), truth)
    late = replica_of(model, kind, tmp_path / "late")
    for again in (replica, late):
        with Subscriber(config, again.target, store=store) as subscriber:
            subscriber.update()
            assert subscriber.version == 7
            assert same(again.bits(), truth)


def test_the_way_from_an_anchor_leads_back_as_well(attach: Attach, store: MemoryStore) -> None:
    """With an anchor after every few versions, the head is rebuilt from nothing."""
    model = TinyModel()
    publish(attach(model, anchor_factor=0.01), model, *range(1, 7))
    back(store, 1)
    assert_head_is(older(1), 7, store)


def test_a_running_publisher_is_fenced_by_name(
    store: MemoryStore, running: Publisher, model: TinyModel
) -> None:
    back(store, 3)
    with pytest.raises(PublisherFencedError, match="committed by a revert to version 3") as refused:
        publish(running, model, 7)
    assert "load the weights of version 3" in refused.value.hint


def test_a_publisher_that_is_faster_is_fenced_first(
    store: MemoryStore, running: Publisher, model: TinyModel
) -> None:
    work = Fault(lambda: publish(running, model, 7), "deltas/")
    done = back(FaultyStore(store, work), 2)
    found = recompute(store)
    assert done.committed is not None
    assert (done.committed.version, done.before.version) == (9, 8)
    assert [found[v].committed.manifest.epoch for v in (7, 8, 9)] == [0, 1, 1]
    assert_head_is(older(2), 9, store)
    with pytest.raises(PublisherFencedError):
        publish(running, model, 8)


@pytest.mark.usefixtures("running")
def test_another_that_takes_the_chain_over_meanwhile_stops_it(store: MemoryStore) -> None:
    def take() -> None:
        take_over(Chain.open(store), numel=head(store).numel, metadata={})

    with pytest.raises(PublisherFencedError) as refused:
        back(FaultyStore(store, Fault(take, "deltas/")), 2)
    assert "revert again" in refused.value.hint
    assert (head(store).version, head(store).epoch) == (7, 1)


# Publishers that start there


@pytest.mark.usefixtures("closed")
def test_a_publisher_with_newer_weights_is_refused_unless_it_is_told_to_go_on(
    attach: Attach, store: MemoryStore, model: TinyModel
) -> None:
    back(store, 2)
    before = store.get(manifest_key(7))
    with pytest.raises(ChainError, match="version 7 was reverted to the state of version 2") as no:
        attach(model)
    assert "continue_reverted=True" in no.value.hint
    assert (head(store).version, store.get(manifest_key(7))) == (7, before)
    publisher = attach(model, continue_reverted=True)
    assert_head_is(model, publisher.version, store)
    publisher.close()
    attach(TinyModel(seed=5)).close()  # the head is not a reverted one any more


@pytest.mark.usefixtures("closed")
def test_one_that_brings_the_old_weights_goes_on(attach: Attach, store: MemoryStore) -> None:
    back(store, 2)
    model = older(2)
    publisher = attach(model)
    assert (publisher.version, publisher.epoch) == (8, 2)
    publish(publisher, model, 3, 4)
    assert_head_is(model, 10, store)


@pytest.mark.usefixtures("closed")
def test_a_revert_while_a_publisher_starts_is_seen(
    attach: Attach, store: MemoryStore, model: TinyModel
) -> None:
    """It is committed between the look at the head and the takeover."""
    late = Fault(lambda: back(store, 2), manifest_key(7))
    with pytest.raises((ChainError, PublisherFencedError)):
        attach(model, on=FaultyStore(store, late))
    assert reverted_to(head(store)) == 2


# What stops a revert


def test_a_store_that_cannot_decide_leaves_it_to_the_publisher(
    attach: Attach, model: TinyModel
) -> None:
    store = SingleWriterStore()
    publisher = attach(model, on=store, anchor_factor=1000.0)
    publish(publisher, model, 1, 2, 3)
    with pytest.raises(ConfigError, match="cannot decide between two writers") as refused:
        back(store, 1)
    assert "deltachain pull" in refused.value.hint
    assert back(store, 1, dry_run=True).nnz > 0
    assert head(store).version == 3
    model.load_state_dict(older(1).state_dict())  # as the hint says
    publisher.publish(step=1)
    publisher.flush()
    assert_head_is(older(1), 4, store)


@pytest.mark.usefixtures("closed")
def test_versions_that_cannot_be_rebuilt_are_refused_before_anything_is_written(
    store: MemoryStore,
) -> None:
    (part,) = head(store).edge.parts
    kept = store.get(part.key)
    store.delete(part.key)
    before = {info.key for info in store.list()}
    with pytest.raises(BrokenChainError):
        back(store, 2)
    store.put(part.key, kept[:-1] + bytes([kept[-1] ^ 1]))
    with pytest.raises(DigestMismatchError):
        back(store, 2)
    assert {info.key for info in store.list()} == before | {part.key}


@pytest.mark.usefixtures("closed")
def test_a_state_that_is_not_the_manifests_is_never_committed(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fetched, "state", lambda _: StateDigest(1, 2))
    with pytest.raises(DigestMismatchError, match="rebuilt from the store, has another state"):
        back(store, 2)
    assert head(store).version == 6


@pytest.mark.usefixtures("closed")
def test_a_lost_reply_is_settled(store: MemoryStore) -> None:
    done = back(FaultyStore(store, Fault("lose-reply", prefix="manifests/")), 2)
    assert done.committed is not None
    assert head(store).version == 7


class Dying(MemoryStore):
    """The process ends right before or after one of its writes."""

    left: float = float("inf")
    after = False

    def _write(self, write: Callable[[], T]) -> T:
        self.left -= 1
        if self.left < 0 and not self.after:
            raise SystemExit
        done = write()
        if self.left < 0:
            raise SystemExit
        return done

    def put(self, key: str, data: Buffer) -> str:
        return self._write(partial(super().put, key, data))

    def put_if_absent(self, key: str, data: Buffer) -> None:
        self._write(partial(super().put_if_absent, key, data))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("write", [0, 1, 2])
def test_one_that_is_killed_is_done_again(
    attach: Attach, model: TinyModel, write: int, *, after: bool
) -> None:
    """A part, the manifest, the hint."""
    store = Dying()
    publisher = attach(model, on=store, anchor_factor=1000.0)
    publish(publisher, model, 1, 2, 3, 4)
    publisher.close()
    store.left, store.after = write, after
    with pytest.raises(SystemExit):
        back(store, 2)
    store.left = float("inf")
    is_committed = (write, after) >= (1, True)
    assert sorted(recompute(store)) == list(range(5 + is_committed))
    assert (back(store, 2).committed is None) == is_committed
    assert_head_is(older(2), 5, store)


@pytest.mark.usefixtures("closed")
@pytest.mark.parametrize("value", [-1, 9, True, "2", None, [2], 2.0])
def test_a_mark_that_is_none_marks_nothing(store: MemoryStore, value: object) -> None:
    manifest = head(store)
    assert reverted_to(replace(manifest, ext={"deltachain.reverted_to": value})) is None
    assert reverted_to(replace(manifest, ext=revert_mark(2))) == 2
    assert b'"ext":{}' in dump(manifest)
