"""The feed of a bucket, against the emulated Hub."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue

import pytest

from deltachain.retry import Backoff
from deltachain.store import MemoryStore, Store, open_store
from deltachain.store.hf import feed as module
from deltachain.store.hf.feed import HubFeed
from deltachain.store.hf.store import HfStore
from tests.support.hub.faults import RequestFault
from tests.support.hub.server import HubServer

Open = Callable[..., Store]

SHORT = Backoff(0.05, 0.2)
LONG_S = 60.0


class Told:
    """What a feed told."""

    def __init__(self) -> None:
        self._keys: SimpleQueue[str] = SimpleQueue()

    def __call__(self, key: str) -> None:
        self._keys.put(key)

    def next(self) -> str:
        return self._keys.get(timeout=LONG_S)

    def rest(self) -> list[str]:
        found = []
        while True:
            try:
                found.append(self._keys.get_nowait())
            except Empty:
                return found


@contextmanager
def feeding(
    store: Store, told: Told, prefix: str = "", pauses: Backoff = SHORT
) -> Iterator[HubFeed]:
    """A feed with short pauses."""
    hub, folder = store._hub, store._folder  # type: ignore[attr-defined]
    feed = HubFeed(hub, folder, prefix, told, pauses=pauses)
    try:
        yield feed
    finally:
        feed.close()


def connections(hub: HubServer) -> int:
    """Number of streams that were asked for since the Hub started."""
    return hub.counts().get("GET events", 0)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_stores_have_no_feed_unless_they_say_so() -> None:
    assert MemoryStore().feed("", lambda _: None) is None


def test_writes_and_deletions_below_a_prefix_are_told(opened: Open) -> None:
    store, other, told = opened("run/1"), opened("run/10"), Told()
    with feeding(store, told, "manifests/") as feed:
        assert told.next() == ""  # changes before this were not told
        assert feed.is_live
        store.put("deltas/1", b"delta")
        other.put("manifests/1", b"of another chain")
        store.put("manifests/1", b"1")
        assert told.next() == "manifests/1"
        store.delete("manifests/1")
        store.put("manifests/2", b"2")
        assert [told.next(), told.next()] == ["manifests/1", "manifests/2"]
    assert not told.rest()
    assert not feed.is_live


def test_feed_costs_one_request(hub: HubServer, opened: Open) -> None:
    store, writer, told, before = opened(), opened(), Told(), connections(hub)
    with feeding(store, told):
        assert told.next() == ""
        for number in range(3):
            writer.put(f"manifests/{number}", bytes([number]))
            assert told.next() == f"manifests/{number}"
        assert store.requests == connections(hub) - before == 1


def test_nothing_is_lost_when_the_hub_ends_the_stream(
    hub: HubServer, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SETTLED_S", 0.0)
    hub.configure(stream_s=0.2, calls=1_000_000)
    store, told, before = opened(), Told(), connections(hub)
    with feeding(store, told):
        store.put("first", b"0")
        keys = [told.next()]
        while "first" not in keys:
            keys.append(told.next())
        for number in range(10):
            store.put(f"m/{number}", bytes([number]))
            assert told.next() == f"m/{number}"
        until(lambda: connections(hub) - before > 2)
        store.put("last", b"last")
        assert told.next() == "last"


def test_hub_that_restarts_is_followed_again(hub: HubServer, opened: Open) -> None:
    store, told = opened(), Told()
    with feeding(store, told) as feed:
        assert told.next() == ""
        store.put("a", b"1")
        assert told.next() == "a"
        hub.kill()
        assert told.next() == ""
        assert not feed.is_live
        hub.start()
        until(lambda: feed.is_live)  # its cursor is of a log that is gone
        told.rest()
        store.put("b", b"2")
        assert told.next() == "b"


@pytest.mark.parametrize("status", [401, 403, 404, 501])
def test_hub_without_a_feed_is_asked_once(hub: HubServer, opened: Open, status: int) -> None:
    hub.inject(RequestFault(do="status", path="/api/buckets/.*/events", status=status, times=9))
    store, told = opened(), Told()
    with feeding(store, told) as feed:
        feed._thread.join(LONG_S)
        assert not feed._thread.is_alive()
        assert not feed.is_live
    assert store.requests == 1


def test_absent_feed_and_token_of_nobody(hub: HubServer, opened: Open) -> None:
    stranger = opened(token="hf_of_nobody")  # noqa: S106
    with feeding(stranger, Told()) as feed:
        feed._thread.join(LONG_S)
        assert not feed.is_live
    hub.configure(feed="absent", calls=1_000_000)
    with feeding(opened(), Told()) as feed:
        feed._thread.join(LONG_S)
        assert not feed.is_live


def test_answer_of_a_portal_is_no_feed(hub: HubServer, bucket: str) -> None:
    url = {"endpoint": f"{hub.url}/_admin/counts?", "token": hub.token}
    with feeding(open_store(f"hf://buckets/{bucket}", url), Told()) as feed:  # 200, JSON
        feed._thread.join(LONG_S)
        assert not feed.is_live


@pytest.mark.parametrize("do", ["status", "refuse"])
def test_hub_in_trouble_is_asked_again(hub: HubServer, opened: Open, do: str) -> None:
    path = "/api/buckets/.*/events"
    hub.inject(RequestFault(do=do, path=path, status=503, times=2))  # type: ignore[arg-type]
    before = connections(hub)
    with feeding(opened(), Told()) as feed:
        until(lambda: feed.is_live)
    assert connections(hub) - before >= 3


def test_hub_says_how_long_to_wait(hub: HubServer, opened: Open) -> None:
    path = "/api/buckets/.*/events"
    hub.inject(RequestFault(do="status", path=path, status=429, retry_after=3600))
    told, before = Told(), connections(hub)
    with feeding(opened(), told) as feed:
        assert told.next() == ""
        feed._thread.join(0.5)  # longer than all pauses of its own
        assert connections(hub) - before == 1


def test_streams_of_a_token_are_limited(hub: HubServer, opened: Open) -> None:
    hub.configure(streams=1, calls=1_000_000)
    first, second = Told(), Told()
    with feeding(opened(), second) as waiting:
        with feeding(opened(), first):
            pass
        until(lambda: waiting.is_live)
        assert hub.streams() == 1
    until(lambda: hub.streams() == 0)


@pytest.mark.parametrize("feed", ["garbage", "stalled"])
def test_stream_without_events_is_never_live(
    hub: HubServer, opened: Open, feed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltachain.store.hf.feed.SILENCE_S", 0.2)
    hub.configure(feed=feed, calls=1_000_000)
    store, told = opened(), Told()
    with feeding(store, told) as reading:
        for _ in range(3):
            assert told.next() == ""  # each stream ends
            assert not reading.is_live


def test_flood_is_given_up(hub: HubServer, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BURST", 100_000)
    monkeypatch.setattr(module, "_RATE", 1000)
    hub.configure(feed="flood", feed_prefix="run/1/", calls=1_000_000)
    told = Told()
    with feeding(opened(), told) as feed:
        assert told.next() == ""
        while told.next():
            pass
        assert len(told.rest()) < 2 * 100_000 / 50
        assert feed._thread.is_alive()


class Recorded(Backoff):
    """Pauses that are recorded and take no time."""

    failures: list[int] = []  # noqa: RUF012 - of one test

    def pause_s(self, failures: int) -> float:
        self.failures.append(failures)
        return 0.0


def test_short_streams_come_less_and_less_often(hub: HubServer, opened: Open) -> None:
    hub.configure(stream_s=0.01, calls=1_000_000)
    store = opened()
    with feeding(store, Told(), pauses=Recorded(1.0, 300.0)):
        until(lambda: store.requests >= 4)
    assert Recorded.failures[:4] == [1, 2, 3, 4]


def test_feed_leaves_the_request_to_others_when_the_budget_is_spent(
    hub: HubServer, opened: Open
) -> None:
    store, told, before = opened(calls=2, window_s=1000), Told(), connections(hub)
    store.find("a")
    store.find("a")
    with feeding(store, told) as feed:
        assert [told.next(), told.next()] == ["", ""]
        assert not feed.is_live
    assert store.requests == 2
    assert connections(hub) == before


@pytest.mark.parametrize("feed", ["live", "stalled"])
def test_thread_ends_when_the_store_is_closed(hub: HubServer, opened: Open, feed: str) -> None:
    hub.configure(feed=feed, calls=1_000_000)
    store, told = opened(), Told()
    made = store.feed("", told)
    assert made is not None
    until(lambda: hub.streams() == 1)
    store.close()
    store.close()
    until(lambda: hub.streams() == 0)  # a silent stream ends at once as well
    assert not [each for each in threading.enumerate() if each.name == "deltachain-feed"]
    told.rest()
    opened().put("a", b"")
    assert not told.rest()


def test_close_does_not_wait_for_a_hub_that_does_not_answer(hub: HubServer, opened: Open) -> None:
    path = "/api/buckets/.*/events"
    hub.inject(RequestFault(do="stall", path=path, seconds=5))
    store = opened()
    assert isinstance(store, HfStore)
    feed = store.feed("", Told())
    until(lambda: hub.faults_left() == 0)
    feed.close()
    assert not feed.is_live
    assert feed._thread.is_alive()  # it ends when it has its answer
    feed._thread.join(LONG_S)
    assert not feed._thread.is_alive()
