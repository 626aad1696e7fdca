"""A revert: followers go back, a publisher at work is fenced, one that starts must mean it."""

from collections.abc import Callable
from pathlib import Path

import pytest

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
from deltachain.store import MemoryStore
from deltachain.subscribe import SubscribeConfig, Subscriber
from deltachain.types import Buffer, StateDigest
from tests.support.faults import Fault, FaultyStore
from tests.support.models import State, TinyModel, bits_of, recompute, replica_of, same, train_
from tests.support.values import present
from tests.unit.manifest_chains import SingleWriterStore

Attach = Callable[..., Publisher]


def publish(publisher: Publisher, model: TinyModel, steps: range) -> list[State]:
    states: list[State] = []
    for step in steps:
        train_(model, step)
        publisher.publish(step=step)
        publisher.flush()
        states.append(bits_of(model))
    return states


@pytest.fixture
def model() -> TinyModel:
    return TinyModel()


@pytest.fixture
def running(attach: Attach, model: TinyModel) -> Publisher:
    """A publisher of versions 0 to 6."""
    publisher = attach(model, anchor_factor=1000.0)
    publish(publisher, model, range(1, 7))
    return publisher


def back(store: MemoryStore, version: int, **settings: object) -> Reverted:
    chain = Chain.open(store)
    return revert(chain, chain.read(version), **settings)  # type: ignore[arg-type]


def head(store: MemoryStore) -> Manifest:
    found = present(Chain.open(store).head())
    return found.manifest


def test_the_head_has_the_old_bits_again(store: MemoryStore, running: Publisher) -> None:
    running.close()
    done = back(store, 2)
    found = recompute(store)
    assert same(found[7].state, found[2].state)
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


def test_the_way_from_an_anchor_leads_back_as_well(
    attach: Attach, store: MemoryStore, model: TinyModel
) -> None:
    """With an anchor after every few versions, the head is rebuilt from nothing."""
    publisher = attach(model, anchor_factor=0.01)
    publish(publisher, model, range(1, 7))
    publisher.close()
    back(store, 1)
    found = recompute(store)
    assert same(found[7].state, found[1].state)


def test_a_running_publisher_is_fenced_by_name(
    store: MemoryStore, running: Publisher, model: TinyModel
) -> None:
    back(store, 3)
    with pytest.raises(PublisherFencedError, match="committed by a revert to version 3") as refused:
        publish(running, model, range(7, 8))
    assert "load the weights of version 3" in refused.value.hint


class Busy(MemoryStore):
    """A publisher at work commits a version whenever somebody uploads a part."""

    work: Callable[[], object] = staticmethod(lambda: None)

    def put(self, key: str, data: Buffer) -> str:
        pin = super().put(key, data)
        if key.startswith("deltas/"):
            work, self.work = self.work, lambda: None
            work()
        return pin


def test_a_publisher_that_is_faster_is_fenced_first(attach: Attach, model: TinyModel) -> None:
    store = Busy()
    publisher = attach(model, on=store, anchor_factor=1000.0)
    publish(publisher, model, range(1, 5))
    store.work = lambda: publish(publisher, model, range(5, 8))
    done = back(store, 2)
    found = recompute(store)
    assert done.committed is not None
    assert (done.committed.version, done.before.version) == (9, 8)
    assert [found[v].committed.manifest.epoch for v in (7, 8, 9)] == [0, 1, 1]
    assert same(found[9].state, found[2].state)
    with pytest.raises(PublisherFencedError):
        publish(publisher, model, range(8, 9))


def test_another_that_takes_the_chain_over_meanwhile_stops_it(
    attach: Attach, model: TinyModel
) -> None:
    store = Busy()
    publisher = attach(model, on=store, anchor_factor=1000.0)
    publish(publisher, model, range(1, 5))
    store.work = lambda: take_over(Chain.open(store), numel=head(store).numel, metadata={})
    with pytest.raises(PublisherFencedError) as refused:
        back(store, 2)
    assert "revert again" in refused.value.hint
    assert (head(store).version, head(store).epoch) == (5, 1)


# Publishers that start there


def test_a_publisher_with_newer_weights_is_refused(
    attach: Attach, store: MemoryStore, running: Publisher, model: TinyModel
) -> None:
    running.close()
    back(store, 2)
    before = store.get(manifest_key(7))
    with pytest.raises(ChainError, match="version 7 was reverted to the state of version 2") as no:
        attach(model)
    assert "continue_reverted=True" in no.value.hint
    assert (head(store).version, store.get(manifest_key(7))) == (7, before)


def test_one_that_is_told_to_goes_on(
    attach: Attach, store: MemoryStore, running: Publisher, model: TinyModel
) -> None:
    running.close()
    back(store, 2)
    publisher = attach(model, continue_reverted=True)
    assert same(recompute(store)[publisher.version].state, bits_of(model))
    publisher.close()
    attach(TinyModel(seed=5)).close()  # the head is not a reverted one any more


def test_one_that_brings_the_old_weights_goes_on(
    attach: Attach, store: MemoryStore, running: Publisher
) -> None:
    running.close()
    back(store, 2)
    older = TinyModel()
    for step in (1, 2):
        train_(older, step)
    publisher = attach(older)
    assert (publisher.version, publisher.epoch) == (8, 2)
    states = publish(publisher, older, range(3, 5))
    assert same(recompute(store)[10].state, states[-1])


def test_a_revert_while_a_publisher_starts_is_seen(attach: Attach, model: TinyModel) -> None:
    """It is committed between the look at the head and the takeover."""

    class Late(MemoryStore):
        work: Callable[[], object] | None = None

        def put_if_absent(self, key: str, data: Buffer) -> None:
            if key == manifest_key(7) and self.work is not None:
                work, self.work = self.work, None
                work()
            super().put_if_absent(key, data)

    store = Late()
    publisher = attach(model, on=store, anchor_factor=1000.0)
    publish(publisher, model, range(1, 7))
    publisher.close()
    store.work = lambda: back(store, 2)
    with pytest.raises((ChainError, PublisherFencedError)):
        attach(model, on=store)
    assert reverted_to(head(store)) == 2


# What stops a revert


def test_a_store_that_cannot_decide_leaves_it_to_the_publisher(
    attach: Attach, model: TinyModel
) -> None:
    store = SingleWriterStore()
    publisher = attach(model, on=store, anchor_factor=1000.0)
    publish(publisher, model, range(1, 4))
    with pytest.raises(ConfigError, match="cannot decide between two writers") as refused:
        back(store, 1)
    assert "deltachain pull" in refused.value.hint
    assert back(store, 1, dry_run=True).nnz > 0
    assert head(store).version == 3
    older = TinyModel()
    train_(older, 1)
    model.load_state_dict(older.state_dict())  # as the hint says
    publisher.publish(step=1)
    publisher.flush()
    found = recompute(store)
    assert same(found[4].state, found[1].state)


def test_versions_that_cannot_be_rebuilt_are_refused_before_anything_is_written(
    store: MemoryStore, running: Publisher
) -> None:
    running.close()
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


def test_a_state_that_is_not_the_manifests_is_never_committed(
    store: MemoryStore, running: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.close()
    chain = Chain.open(store)
    monkeypatch.setattr(Fetched, "state", lambda _: StateDigest(1, 2))
    with pytest.raises(DigestMismatchError, match="rebuilt from the store, has another state"):
        revert(chain, chain.read(2))
    assert head(store).version == 6


def test_a_lost_reply_is_settled(store: MemoryStore, running: Publisher) -> None:
    running.close()
    faulty = FaultyStore(store, Fault("lose-reply", prefix="manifests/"))
    chain = Chain.open(faulty)
    done = revert(chain, chain.read(2))
    assert done.committed is not None
    assert head(store).version == 7


class Dying(MemoryStore):
    """The process ends right before or after one of its writes."""

    left: float = float("inf")
    after = False

    def _dies(self) -> bool:
        self.left -= 1
        return self.left < 0

    def put(self, key: str, data: Buffer) -> str:
        if (dies := self._dies()) and not self.after:
            raise SystemExit
        pin = super().put(key, data)
        if dies:
            raise SystemExit
        return pin

    def put_if_absent(self, key: str, data: Buffer) -> None:
        if (dies := self._dies()) and not self.after:
            raise SystemExit
        super().put_if_absent(key, data)
        if dies:
            raise SystemExit


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("write", [0, 1, 2])
def test_one_that_is_killed_is_done_again(
    attach: Attach, model: TinyModel, write: int, *, after: bool
) -> None:
    """A part, the manifest, the hint."""
    store = Dying()
    publisher = attach(model, on=store, anchor_factor=1000.0)
    publish(publisher, model, range(1, 5))
    publisher.close()
    store.left, store.after = write, after
    with pytest.raises(SystemExit):
        back(store, 2)
    store.left = float("inf")
    is_committed = (write, after) >= (1, True)
    assert sorted(recompute(store)) == list(range(5 + is_committed))
    assert (back(store, 2).committed is None) == is_committed
    found = recompute(store)
    assert same(found[5].state, found[2].state)


@pytest.mark.parametrize("value", [-1, 9, True, "2", None, [2], 2.0])
def test_a_mark_that_is_none_marks_nothing(
    store: MemoryStore, running: Publisher, value: object
) -> None:
    running.close()
    manifest = head(store)
    fields = {name: getattr(manifest, name) for name in manifest.__struct_fields__}
    marked = Manifest(**fields | {"ext": {"deltachain.reverted_to": value}})
    assert reverted_to(marked) is None
    assert reverted_to(Manifest(**fields | {"ext": revert_mark(2)})) == 2
    assert b'"ext":{}' in dump(manifest)
