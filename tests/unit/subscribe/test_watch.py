import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from torch import Tensor

from deltachain.errors import (
    BrokenChainError,
    ChainMismatchError,
    ForkedChainError,
    ObjectNotFoundError,
    StoreWentBackError,
)
from deltachain.format.keys import CHAIN_KEY, HEAD_KEY, MIRROR_KEY, manifest_key
from deltachain.publish import Publisher
from deltachain.store import MemoryStore
from deltachain.subscribe import Subscriber
from deltachain.subscribe.subscriber import LOOK_BACK, Times
from deltachain.types import Buffer
from tests.support.faults import FaultyStore
from tests.support.models import TinyModel, bits_of, replica_of, same, tensors_of
from tests.support.values import present
from tests.unit.manifest_chains import SingleWriterStore, WideStore
from tests.unit.subscribe.accidents import Told, copy, nothing, restore, rewrite
from tests.unit.subscribe.clock import Clock


def gap(store: MemoryStore, *versions: int) -> None:
    for version in versions:
        store.delete(manifest_key(version))


@pytest.mark.parametrize("every_version", [False, True])
@pytest.mark.parametrize("missing", [(3,), (3, 4)])
def test_a_gap_behind_what_is_held_is_named_in_every_mode(
    told: Told,
    publish: "Publish",
    store: MemoryStore,
    missing: tuple[int, ...],
    *,
    every_version: bool,
) -> None:
    publish(1, 2)
    subscriber = told.subscriber
    subscriber.update()
    publish(3, 4, 5, 6, 7, 8)
    gap(store, *missing)
    told.clock.happens = [nothing] * (LOOK_BACK + 2)
    follow = subscriber.follow(
        stop=told.clock.stop, every_version=every_version, looked=told.looked
    )
    assert list(follow) == []
    wrong = told.said[-1]
    assert isinstance(wrong, BrokenChainError)
    assert wrong.version in missing
    assert f"manifest of version {wrong.version} is missing" in str(wrong)
    assert subscriber.watch.doubt is None  # what is held is the chain's
    with pytest.raises(BrokenChainError, match="is missing"):
        subscriber.update()


@pytest.mark.parametrize("every_version", [False, True])
@pytest.mark.parametrize("hint", [True, False])
def test_an_anchor_leads_around_a_gap(
    told: Told,
    publish: "Publish",
    store: MemoryStore,
    zeros: dict[str, Tensor],
    model: TinyModel,
    caplog: pytest.LogCaptureFixture,
    *,
    add_anchor: Callable[[], None],
    every_version: bool,
    hint: bool,
) -> None:
    publish(1, 2)
    subscriber = told.subscriber
    subscriber.update()
    publish(3, 4, 5)
    add_anchor()
    publish(6)
    gap(store, 3)
    if not hint:
        store.delete(HEAD_KEY)
    told.clock.happens = [nothing] * (LOOK_BACK + 2)
    follow = subscriber.follow(stop=told.clock.stop, every_version=every_version)
    assert [receipt.version for receipt in follow][-1] == 6
    assert same(bits_of(zeros), bits_of(model))
    assert "manifest of version 3 is missing" in caplog.text
    assert "reached version 6 by another plan" in caplog.text


def test_an_update_goes_around_a_gap(
    subscriber: Subscriber,
    publish: "Publish",
    store: MemoryStore,
    add_anchor: Callable[[], None],
    zeros: dict[str, Tensor],
    model: TinyModel,
) -> None:
    publish(1, 2)
    subscriber.update()
    publish(3, 4, 5)
    add_anchor()
    publish(6)
    gap(store, 3)
    store.delete(HEAD_KEY)
    receipt = present(subscriber.update())
    assert receipt.version == 6
    assert same(bits_of(zeros), bits_of(model))


HOUR = 3600.0


def test_a_fetch_is_no_silence_while_its_requests_are_answered() -> None:
    since: list[float | None] = [None]
    times = Times(lambda: since[0])
    with times.staging():
        assert times.silence_s == 0
        since[0] = time.monotonic() - HOUR
        assert HOUR <= times.silence_s < 2 * HOUR
        since[0] = None
        assert times.silence_s == 0
    assert times.silence_s < HOUR


class Unanswered(MemoryStore):
    """A store whose payloads come after an hour in which it did not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.subscriber: Subscriber | None = None
        self.silences: list[float] = []
        self.since: float | None = None

    @property
    def unanswered_since(self) -> float | None:
        return self.since

    def read(self, key: str, *, nbytes: int, pin: str = "") -> Buffer:
        assert self.subscriber is not None
        self.since = time.monotonic() - HOUR
        self.silences.append(self.subscriber.times.silence_s)
        self.since = None
        return super().read(key, nbytes=nbytes, pin=pin)


def test_a_subscriber_knows_that_its_fetch_has_no_answer() -> None:
    store = Unanswered()
    with Publisher("memory://unanswered", store=store).attach(TinyModel()):
        store.subscriber = Subscriber(
            "memory://unanswered", tensors_of(TinyModel(seed=1)), store=store
        )
        with store.subscriber:
            store.subscriber.update()
            assert store.silences
            assert all(silence >= HOUR for silence in store.silences)
            assert store.subscriber.times.silence_s < HOUR


Publish = Callable[..., None]

MIRRORED: Final = b'{"format":"deltachain/1","chain":"0","source":"s3://elsewhere"}'
Subscribe = Callable[..., Subscriber]


@pytest.fixture(params=[MemoryStore, SingleWriterStore, WideStore])
def store(request: pytest.FixtureRequest) -> MemoryStore:
    made: MemoryStore = request.param()
    return made


@pytest.fixture
def subscriber(zeros: dict[str, Tensor], subscribe: Subscribe) -> Subscriber:
    return subscribe(zeros)


# The store goes back


@pytest.mark.parametrize("record", [b"", b"{", MIRRORED])
@pytest.mark.parametrize("back", [1, 5])
def test_a_store_that_went_back_is_said_to_and_heals(
    told: Told, publish: Publish, store: MemoryStore, back: int, record: bytes
) -> None:
    """Also one that calls itself a mirror: anybody who can write there could say so."""
    if record:
        store.put(MIRROR_KEY, record)
    publish(*range(1, 7 - back))
    earlier = copy(store)
    publish(*range(7 - back, 7))
    newest = copy(store)
    told.run(lambda: restore(store, earlier), lambda: restore(store, newest))
    wrong = [exc for exc in told.said if exc is not None]
    assert wrong
    assert {type(exc) for exc in wrong} == {StoreWentBackError}
    assert f"version 6 is held, the newest there is {6 - back}" in str(wrong[0])
    assert [exc is None for exc in told.doubts] == [exc is None for exc in told.said]
    assert (told.said[-1], told.subscriber.watch.doubt) == (None, None)


def test_a_follower_that_comes_back_to_an_older_store_does_not_believe_it(
    publish: Publish,
    store: MemoryStore,
    model: TinyModel,
    subscribe: Subscribe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publish(1)
    earlier = copy(store)
    publish(2, 3)
    replica = replica_of(model, "folder", tmp_path / "mirror")
    with subscribe(replica) as first:
        first.update()
    restore(store, earlier)
    again = subscribe(tmp_path / "mirror")
    told = Told(again, Clock(again, monkeypatch))
    assert told.run(nothing) == []
    assert None not in told.said
    assert isinstance(again.watch.doubt, StoreWentBackError)
    with pytest.raises(StoreWentBackError, match="rollback` to 1"):
        again.update()
    again.close()


def test_a_status_never_lags_by_less_thannothing(
    subscriber: Subscriber, publish: Publish, store: MemoryStore
) -> None:
    publish(1)
    earlier = copy(store)
    publish(2, 3)
    subscriber.update()
    held = present(subscriber.held)
    status = subscriber.status()
    assert (status.lag_versions, status.doubt, status.manifest) == (0, "", held.manifest)
    restore(store, earlier)
    status = subscriber.status()
    assert (status.head, status.lag_versions) == (1, None)
    assert status.doubt.startswith("the store went back: version 3 is held")


def test_a_rollback_to_what_is_there_leads_out(
    told: Told, publish: Publish, store: MemoryStore, zeros: dict[str, Tensor], model: TinyModel
) -> None:
    publish(1)
    earlier, bits = copy(store), bits_of(model)
    publish(2, 3)
    told.run(lambda: restore(store, earlier))
    subscriber = told.subscriber
    assert isinstance(subscriber.watch.doubt, StoreWentBackError)
    subscriber.rollback(1)
    subscriber.release()
    assert same(bits_of(zeros), bits)
    told.run(nothing)
    assert told.doubts[-1] is None
    rewrite(store, range(3))
    assert told.run(nothing)[-1] == subscriber.chain.newest(1) > 3
    assert told.doubts[-1] is None


@pytest.mark.parametrize("further", [0, 1, 5])
def test_a_history_that_was_rewritten_ends_it(
    told: Told, publish: Publish, store: MemoryStore, further: int
) -> None:
    """Also when it is exactly as long as the one that is held."""
    publish(1)
    earlier = copy(store)
    publish(2, 3, 4)

    def lose() -> None:
        restore(store, earlier)
        rewrite(store, range(2 + further))

    with pytest.raises(ForkedChainError, match=r"version 4|version 5"):
        told.run(lose)
    assert isinstance(told.subscriber.watch.doubt, ForkedChainError)
    assert told.subscriber.version == 4


# A look that misses what is there


@pytest.mark.parametrize("key", [manifest_key(2), CHAIN_KEY])
def test_one_stale_look_is_of_no_consequence(
    told: Told, publish: Publish, store: MemoryStore, key: str
) -> None:
    publish(1, 2)
    data = store.get(key)

    told.run(nothing)
    for turn in range(LOOK_BACK):
        told.run(
            *[nothing] * turn,
            lambda: store.delete(key),
            lambda: store.put(key, data),
            *[nothing] * LOOK_BACK,
            turns=0,
        )
        assert set(told.said) == {None}
        assert set(told.doubts) == {None}


# Things that are lost


def test_a_chain_whose_identity_is_lost_says_so_and_heals(
    told: Told, publish: Publish, store: MemoryStore
) -> None:
    publish(1)
    data = store.get(CHAIN_KEY)
    told.run(lambda: store.delete(CHAIN_KEY), lambda: store.put(CHAIN_KEY, data))
    wrong = [exc for exc in told.said if exc is not None]
    assert {type(exc) for exc in wrong} == {ObjectNotFoundError}
    assert "is lost: chain.json is gone" in str(wrong[0])
    assert any(told.doubts)
    assert (told.said[-1], told.subscriber.watch.doubt) == (None, None)


def test_another_chain_at_the_url_is_named(
    told: Told, publish: Publish, store: MemoryStore
) -> None:
    publish(1)
    mine = store.get(CHAIN_KEY)
    chain = told.subscriber.chain.identity.chain.encode()
    other = mine.replace(chain, b"f" * len(chain))
    with pytest.raises((ChainMismatchError, ForkedChainError), match="f" * len(chain)) as caught:
        told.run(lambda: store.put(CHAIN_KEY, other))
    assert "corrupt" not in str(caught.value)
    assert told.subscriber.watch.doubt is caught.value


def test_a_lost_manifest_of_what_is_held_is_no_fork(
    told: Told, publish: Publish, store: MemoryStore, zeros: dict[str, Tensor], model: TinyModel
) -> None:
    publish(1, 2)
    told.subscriber.update()
    publish(3, 4, 5, 6)
    store.delete(manifest_key(2))
    assert told.run(nothing)[-1] == 6
    assert same(bits_of(zeros), bits_of(model))


def test_who_comes_back_after_long_is_told_by_states(
    told: Told,
    publish: Publish,
    store: MemoryStore,
    zeros: dict[str, Tensor],
    model: TinyModel,
    *,
    add_anchor: Callable[[], None],
) -> None:
    """A rule that removes old objects took the manifests around the one that is held."""
    publish(1, 2)
    told.subscriber.update()
    publish(3, 4)
    add_anchor()
    publish(5, 6, 7, 8, 9)
    for version in range(4):
        store.delete(manifest_key(version))
    assert told.run(nothing)[-1] == 9
    assert same(bits_of(zeros), bits_of(model))


# What it costs


def test_looking_again_costs_little(
    subscribe: Subscribe, zeros: dict[str, Tensor], publish: Publish, store: MemoryStore
) -> None:
    publish(1)
    asked: list[str] = []

    class Counting(FaultyStore):
        def get(self, key: str, **limits: int) -> bytes:
            asked.append(key)
            return super().get(key, **limits)

        def find(self, key: str) -> object:  # type: ignore[override]
            asked.append(key)
            return super().find(key)

    if isinstance(store, WideStore):
        subscriber = subscribe(zeros)
    else:
        subscriber = subscribe(zeros, on=Counting(store))
    subscriber.update()
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(subscriber, patch)
        asked.clear()
        looks = store.looks if isinstance(store, WideStore) else asked
        looks.clear()
        clock.happens = [nothing] * (4 * LOOK_BACK - 1)
        assert clock.run(subscriber) == []
    turns = 4 * LOOK_BACK
    each = 4 if isinstance(store, SingleWriterStore) and not isinstance(store, WideStore) else 1
    more = 1 if isinstance(store, WideStore) else 6
    assert len(looks) <= each * turns + more * turns // LOOK_BACK
