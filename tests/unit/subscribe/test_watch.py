import time
from pathlib import Path
from typing import Any, Final

import pytest

from deltachain import errors
from deltachain.format.keys import CHAIN_KEY, HEAD_KEY, MIRROR_KEY, manifest_key
from deltachain.store import MemoryStore
from deltachain.subscribe import Subscriber
from deltachain.subscribe.subscriber import LOOK_BACK, Times
from deltachain.types import Buffer
from tests.support.backup import objects_of, put_back
from tests.support.faults import FaultyStore
from tests.support.models import replica_of
from tests.support.values import present
from tests.unit.manifest_chains import SingleWriterStore, WideStore
from tests.unit.subscribe.accidents import Run, Told, nothing, rewrite
from tests.unit.subscribe.clock import Clock

HOUR = 3600.0
MIRRORED: Final = b'{"format":"deltachain/1","chain":"0","source":"s3://elsewhere"}'


@pytest.fixture(params=[MemoryStore, SingleWriterStore, WideStore])
def store(request: pytest.FixtureRequest) -> MemoryStore:
    made: MemoryStore = request.param()
    return made


@pytest.fixture
def subscriber(run: Run) -> Subscriber:
    """Holds nothing."""
    return run.subscribe(run.zeros)


def troubles(told: Told) -> list[errors.DeltaChainError]:
    """What was wrong, of a follower that ended without any trouble or doubt."""
    assert (told.said[-1], told.subscriber.watch.doubt) == (None, None)
    return [exc for exc in told.said if exc is not None]


# Manifests that are missing


@pytest.mark.parametrize("every_version", [False, True])
@pytest.mark.parametrize("missing", [(3,), (3, 4)])
def test_a_gap_behind_what_is_held_is_named_in_every_mode(
    run: Run, told: Told, missing: tuple[int, ...], *, every_version: bool
) -> None:
    run.publish(1, 2)
    subscriber = told.subscriber
    subscriber.update()
    run.publish(3, 4, 5, 6, 7, 8)
    for version in missing:
        run.store.delete(manifest_key(version))
    told.clock.happens = [nothing] * (LOOK_BACK + 2)
    follow = subscriber.follow(
        stop=told.clock.stop, every_version=every_version, looked=told.looked
    )
    assert list(follow) == []
    wrong = told.said[-1]
    assert isinstance(wrong, errors.BrokenChainError)
    assert wrong.version in missing
    assert f"manifest of version {wrong.version} is missing" in str(wrong)
    assert subscriber.watch.doubt is None  # what is held is the chain's
    with pytest.raises(errors.BrokenChainError, match="is missing"):
        subscriber.update()


@pytest.mark.parametrize("how", ["update", "follow", "follow every version"])
@pytest.mark.parametrize("hint", [True, False])
def test_an_anchor_leads_around_a_gap(
    run: Run, told: Told, caplog: pytest.LogCaptureFixture, *, how: str, hint: bool
) -> None:
    run.publish(1, 2)
    subscriber = told.subscriber
    subscriber.update()
    run.publish(3, 4, 5)
    run.add_anchor()
    run.publish(6)
    run.store.delete(manifest_key(3))
    if not hint:
        run.store.delete(HEAD_KEY)
    if how == "update":
        receipt = present(subscriber.update())
    else:
        told.clock.happens = [nothing] * (LOOK_BACK + 2)
        *_, receipt = subscriber.follow(
            stop=told.clock.stop, every_version=how == "follow every version"
        )
        assert "manifest of version 3 is missing" in caplog.text
        assert "reached version 6 by another plan" in caplog.text
    assert receipt.version == 6
    assert run.matches(run.zeros)


def test_a_lost_manifest_of_what_is_held_is_no_fork(run: Run, told: Told) -> None:
    run.publish(1, 2)
    told.subscriber.update()
    run.publish(3, 4, 5, 6)
    run.store.delete(manifest_key(2))
    assert told.run(nothing)[-1] == 6
    assert run.matches(run.zeros)


def test_who_comes_back_after_long_is_told_by_states(run: Run, told: Told) -> None:
    """A rule that removes old objects took the manifests around the one that is held."""
    run.publish(1, 2)
    told.subscriber.update()
    run.publish(3, 4)
    run.add_anchor()
    run.publish(5, 6, 7, 8, 9)
    for version in range(4):
        run.store.delete(manifest_key(version))
    assert told.run(nothing)[-1] == 9
    assert run.matches(run.zeros)


# The store goes back


@pytest.mark.parametrize("record", [b"", b"{", MIRRORED])
@pytest.mark.parametrize("back", [1, 5])
def test_a_store_that_went_back_is_said_to_and_heals(
    run: Run, told: Told, back: int, record: bytes
) -> None:
    """Also one that calls itself a mirror: anybody who can write there could say so."""
    run.publish()
    if record:
        run.store.put(MIRROR_KEY, record)
    run.publish(*range(1, 7 - back))
    earlier = objects_of(run.store)
    run.publish(*range(7 - back, 7))
    newest = objects_of(run.store)
    told.run(lambda: put_back(run.store, earlier), lambda: put_back(run.store, newest))
    wrong = troubles(told)
    assert {type(exc) for exc in wrong} == {errors.StoreWentBackError}
    assert f"version 6 is held, the newest there is {6 - back}" in str(wrong[0])
    assert [exc is None for exc in told.doubts] == [exc is None for exc in told.said]


def test_a_follower_that_comes_back_to_an_older_store_does_not_believe_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.publish(1)
    earlier = objects_of(run.store)
    run.publish(2, 3)
    run.join(replica_of(run.model, "folder", run.mirror)).close()
    put_back(run.store, earlier)
    with run.subscribe(run.mirror) as again:
        told = Told(again, Clock(again, monkeypatch))
        assert told.run(nothing) == []
        assert None not in told.said
        assert isinstance(again.watch.doubt, errors.StoreWentBackError)
        with pytest.raises(errors.StoreWentBackError, match="rollback` to 1"):
            again.update()


def test_a_status_never_lags_by_less_than_nothing(
    run: Run, subscriber: Subscriber, told: Told
) -> None:
    run.publish(1)
    earlier = objects_of(run.store)
    run.publish(2, 3)
    subscriber.update()
    held = present(subscriber.held)
    status = subscriber.status()
    assert (status.lag_versions, status.doubt, status.manifest) == (0, "", held.manifest)
    put_back(run.store, earlier)
    told.run(nothing)
    status = subscriber.status()
    assert (status.head, status.lag_versions) == (1, None)
    assert status.doubt.startswith("the store went back: version 3 is held")
    assert status.trouble.startswith(status.doubt)


def test_a_status_makes_no_request(run: Run, subscriber: Subscriber) -> None:
    status = subscriber.status()
    assert (status.version, status.head, status.chain, status.ready) == (None, None, None, False)
    run.publish(1)
    subscriber.update()
    asked = subscriber.store.requests
    assert (subscriber.status().head, subscriber.status().ready) == (1, True)
    assert subscriber.store.requests == asked


def test_a_rollback_to_what_is_there_leads_out(run: Run, told: Told) -> None:
    run.publish(1)
    earlier = objects_of(run.store)
    run.publish(2, 3)
    told.run(lambda: put_back(run.store, earlier))
    subscriber = told.subscriber
    assert isinstance(subscriber.watch.doubt, errors.StoreWentBackError)
    subscriber.rollback(1)
    subscriber.release()
    assert run.matches(run.zeros, 1)
    told.run(nothing)
    assert told.doubts[-1] is None
    rewrite(run.store, range(3))
    assert told.run(nothing)[-1] == subscriber.chain.newest(1) > 3
    assert told.doubts[-1] is None


@pytest.mark.parametrize("further", [0, 1, 5])
def test_a_history_that_was_rewritten_ends_it(run: Run, told: Told, further: int) -> None:
    """Also when it is exactly as long as the one that is held."""
    run.publish(1)
    earlier = objects_of(run.store)
    run.publish(2, 3, 4)

    def lose() -> None:
        put_back(run.store, earlier)
        rewrite(run.store, range(2 + further))

    with pytest.raises(errors.ForkedChainError, match=r"version 4|version 5"):
        told.run(lose)
    assert isinstance(told.subscriber.watch.doubt, errors.ForkedChainError)
    assert told.subscriber.version == 4


# The chain is lost, or seems to be


@pytest.mark.parametrize("key", [manifest_key(2), CHAIN_KEY])
def test_one_stale_look_is_of_no_consequence(run: Run, told: Told, key: str) -> None:
    run.publish(1, 2)
    data = run.store.get(key)
    told.run(nothing)
    for turn in range(LOOK_BACK):
        told.run(
            *[nothing] * turn,
            lambda: run.store.delete(key),
            lambda: run.store.put(key, data),
            *[nothing] * LOOK_BACK,
            turns=0,
        )
        assert set(told.said) == {None}
        assert set(told.doubts) == {None}


@pytest.mark.parametrize("is_emptied", [False, True])
def test_a_chain_whose_identity_is_lost_says_so_and_heals(
    run: Run, told: Told, *, is_emptied: bool
) -> None:
    """A folder that is not mounted has no objects, and looks like one where nothing is new."""
    run.publish(1)
    before = objects_of(run.store)
    left = {} if is_emptied else {key: before[key] for key in before if key != CHAIN_KEY}
    told.run(lambda: put_back(run.store, left), lambda: put_back(run.store, before))
    wrong = troubles(told)
    assert {type(exc) for exc in wrong} == {errors.ObjectNotFoundError}
    assert "is lost: chain.json is gone" in str(wrong[0])
    assert any(told.doubts)


def test_another_chain_at_the_url_is_named(run: Run, told: Told) -> None:
    run.publish(1)
    mine = run.store.get(CHAIN_KEY)
    chain = told.subscriber.chain.identity.chain.encode()
    other = mine.replace(chain, b"f" * len(chain))
    with pytest.raises(
        (errors.ChainMismatchError, errors.ForkedChainError), match="f" * len(chain)
    ) as caught:
        told.run(lambda: run.store.put(CHAIN_KEY, other))
    assert "corrupt" not in str(caught.value)
    assert told.subscriber.watch.doubt is caught.value


# A store that does not answer


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
        self.since = time.monotonic() - HOUR
        self.silences.append(present(self.subscriber).times.silence_s)
        self.since = None
        return super().read(key, nbytes=nbytes, pin=pin)


def test_a_subscriber_knows_that_its_fetch_has_no_answer(tmp_path: Path) -> None:
    store = Unanswered()
    run = Run(store, tmp_path)
    run.publish()
    with run.subscribe(run.zeros) as subscriber:
        store.subscriber = subscriber
        subscriber.update()
        assert store.silences
        assert all(silence >= HOUR for silence in store.silences)
        assert subscriber.times.silence_s < HOUR
    run.close()


# What it costs


class Counting(FaultyStore):
    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.asked: list[str] = []

    def get(self, key: str, **limits: int) -> bytes:
        self.asked.append(key)
        return super().get(key, **limits)

    def find(self, key: str) -> object:  # type: ignore[override]
        self.asked.append(key)
        return super().find(key)


def test_looking_again_costs_little(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.publish(1)
    looks: list[Any]
    if is_wide := isinstance(run.store, WideStore):
        subscriber, looks = run.join(run.zeros), run.store.looks
    else:
        counting = Counting(run.store)
        subscriber, looks = run.join(run.zeros, on=counting), counting.asked
    clock = Clock(subscriber, monkeypatch)
    looks.clear()
    clock.happens = [nothing] * (4 * LOOK_BACK - 1)
    assert clock.run() == []
    turns = 4 * LOOK_BACK
    each = 4 if isinstance(run.store, SingleWriterStore) and not is_wide else 1
    more = 1 if is_wide else 6
    assert len(looks) <= each * turns + more * turns // LOOK_BACK
