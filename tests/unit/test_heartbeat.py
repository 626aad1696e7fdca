"""Heartbeats: renewed while training is idle, so that a reader notices what a store withholds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from threading import Event

import pytest
from msgspec.structs import replace

from deltachain.chain.chain import Chain, Committed
from deltachain.chain.heartbeat import judge_age, read_heartbeat, write_heartbeat
from deltachain.chain.trust import Trust
from deltachain.errors import (
    ConfigError,
    DeltaChainError,
    FormatError,
    MirrorLagsError,
    SignatureError,
    StaleChainError,
)
from deltachain.format.documents import Edge, Heartbeat, Manifest, unseal
from deltachain.format.keys import HEARTBEAT_KEY, manifest_key
from deltachain.mirror import Mirror
from deltachain.publish.beside import HeartbeatThread
from deltachain.publish.writer import Writer
from deltachain.store import MemoryStore
from deltachain.subscribe import SubscribeConfig, Subscriber
from tests.hostile.signed import MALLORY, NOBODY, SPEC, Author, Follower, bits_of, key_of, trust_of
from tests.support.values import present
from tests.unit.replica.replicas import eventually

LIMIT_S = 60.0


def follower_of(store: MemoryStore, *, mirror: bool = False) -> Follower:
    """A follower that trusts the owner, and for a minute."""
    follower = Follower(store, 1)
    config = SubscribeConfig(
        url=store.url,
        trusted_keys=str(key_of(1).public),
        max_heartbeat_age_s=LIMIT_S,
        poll_s=0.001,
        mirror=mirror,
    )
    follower.subscriber = Subscriber(config, {SPEC.name: follower.tensor}, store=store)
    return follower


def head_of(author: Author) -> Committed:
    assert author.parent is not None
    return author.parent


def beat(author: Author, *, age: float = 0.0, head: Committed | None = None) -> None:
    write_heartbeat(author.chain, head or head_of(author), now=time.time() - age, tags={})


AUTHOR = Author().grow(2)
HEAD = head_of(AUTHOR)
NOW = HEAD.manifest.time


def heartbeat(version: int = 1, manifest: str = HEAD.digest, age: float = 0.0) -> Heartbeat:
    return Heartbeat(chain="c", version=version, manifest=manifest, time=NOW + 1000 - age)


@pytest.mark.parametrize(
    ("after", "found", "error"),
    [
        (0, None, ""),
        (LIMIT_S, None, ""),
        (LIMIT_S + 1, None, "61 s old, more than 60 s"),
        (1000, heartbeat(), ""),
        (1000, heartbeat(age=LIMIT_S), ""),
        (1000, heartbeat(age=LIMIT_S + 1), "61 s old"),
        (1000, heartbeat(manifest="0" * 64), "1000 s old"),
        (1000, heartbeat(version=0, manifest="0" * 64), "1000 s old"),
        (0, heartbeat(version=2), "names version 2"),
    ],
)
def test_a_version_is_as_young_as_its_last_sign(
    after: float, found: Heartbeat | None, error: str
) -> None:
    stale = judge_age(HEAD, found, now=NOW + after, most_s=LIMIT_S, url="u")
    assert (stale is None) == (not error)
    assert error in str(stale)


def test_a_newcomer_joins_only_while_the_publisher_gives_signs() -> None:
    author = Author().grow(2)  # of 2023
    follower = follower_of(author.store)
    with pytest.raises(StaleChainError, match="more than 60 s") as caught:
        follower.subscriber.update()
    assert caught.value.retryable
    assert not follower.holds(bits_of(1))
    beat(author)
    follower.subscriber.update()
    assert follower.holds(bits_of(1))


def test_a_store_that_withholds_versions_is_found_out_by_the_heartbeat() -> None:
    author = Author().grow(2)
    beat(author.grow(1))
    author.store.delete(manifest_key(2))
    follower = follower_of(author.store)
    with pytest.raises(StaleChainError, match="its heartbeat names version 2"):
        follower.subscriber.update()
    author.store.delete(HEARTBEAT_KEY)  # so it has to be withheld as well
    with pytest.raises(StaleChainError, match="more than 60 s"):
        follower.subscriber.update()


def test_a_follower_serves_on_and_says_that_the_chain_is_stale() -> None:
    author = Author().grow(2)
    beat(author)
    follower, stop = follower_of(author.store), Event()
    seen: list[DeltaChainError | None] = []

    def looked(error: DeltaChainError | None) -> None:
        seen.append(error)
        if isinstance(error, StaleChainError):
            beat(author)
        if error is None and any(isinstance(one, StaleChainError) for one in seen):
            stop.set()
        elif error is None and len(seen) == 20:
            beat(author, age=LIMIT_S + 1)
        assert len(seen) < 1000

    assert len(list(follower.subscriber.follow(stop=stop, looked=looked))) == 1
    assert seen[:20] == [None] * 20
    assert follower.holds(bits_of(1))


def test_a_mirror_that_is_behind_is_stale_once_its_sign_is_too_old() -> None:
    author = Author().grow(2)
    beat(author)
    follower, stop = follower_of(author.store, mirror=True), Event()
    follower.subscriber.update()
    older = author.chain.read(0)
    author.store.delete(manifest_key(1))  # as if it were not copied yet
    beat(author, head=older)
    seen: list[DeltaChainError | None] = []

    def looked(error: DeltaChainError | None) -> None:
        seen.append(error)
        if isinstance(error, StaleChainError):
            stop.set()
        elif isinstance(error, MirrorLagsError):
            beat(author, age=LIMIT_S + 1, head=older)
        assert len(seen) < 1000

    list(follower.subscriber.follow(stop=stop, looked=looked))
    assert [type(one) for one in seen if one is not None] == [MirrorLagsError, StaleChainError]


def test_an_older_version_that_is_asked_for_needs_no_sign() -> None:
    follower = follower_of(Author().grow(3).store)
    follower.subscriber.update(1)
    assert follower.holds(bits_of(1))


def forged(
    data: bytes, trust: Trust = NOBODY, signed: str = f"{7:032x}", **fields: object
) -> bytes:
    found = unseal(data, Heartbeat, key=HEARTBEAT_KEY)
    return trust.seal(replace(found, **fields), signed)


FORGERIES: dict[str, Callable[[bytes], bytes]] = {
    "by nobody": lambda data: forged(data, time=time.time()),
    "by another key": lambda data: forged(data, MALLORY, time=time.time()),
    "of another chain": lambda data: forged(data, trust_of(1, key=1), "b" * 32, chain="b" * 32),
    "of another version": lambda data: data.replace(b'"version":1', b'"version":0'),
    "nothing": lambda _: b"{}",
    "large": lambda _: b"x" * (1 << 17),
    "a manifest": lambda _: Author().grow(2).store.get(manifest_key(1)),
}


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
def test_a_heartbeat_that_no_trusted_key_signed_is_no_sign(
    forge: Callable[[bytes], bytes],
) -> None:
    author = Author().grow(2)
    beat(author, age=10 * LIMIT_S)
    author.store.put(HEARTBEAT_KEY, forge(author.store.get(HEARTBEAT_KEY)))
    follower = follower_of(author.store)
    with pytest.raises(FormatError):
        follower.subscriber.update()
    assert not follower.holds(bits_of(1))


def test_a_limit_of_age_needs_trusted_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTACHAIN_MAX_HEARTBEAT_AGE_S", "60")
    with pytest.raises(ConfigError, match="without DELTACHAIN_TRUSTED_KEYS"):
        Chain.open(Author(NOBODY).grow(1).store)
    monkeypatch.setenv("DELTACHAIN_TRUSTED_KEYS", str(key_of(1).public))
    assert Trust.of_reader().max_age_s == 60
    assert Trust.of_reader(max_age_s=5).max_age_s == 5
    assert Trust.of_writer().max_age_s is None


@contextmanager
def beating(author: Author, *, leads: bool = True) -> Iterator[Writer]:
    writer = Writer(author.chain, numel=SPEC.numel, metadata={}, parent=author.parent)
    thread = HeartbeatThread(writer, leads=leads, every_s=0.02)
    try:
        yield writer
    finally:
        thread.close()
        thread.close()


def seen_in(author: Author) -> Heartbeat | None:
    return read_heartbeat(Chain.open(author.store, trust_of(1)))


def test_a_publisher_with_a_key_renews_its_heartbeat_while_it_is_idle() -> None:
    author = Author().grow(2)
    with beating(author) as writer:
        eventually(lambda: seen_in(author))
        first = present(seen_in(author))
        assert (first.version, first.manifest) == (1, head_of(author).digest)
        eventually(lambda: (seen_in(author) or first).time > first.time)
        writer.parent = head_of(author.grow(1))
        eventually(lambda: (seen_in(author) or first).version == 2)


def test_a_clock_that_is_set_back_delays_no_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    author, now, ahead = Author().grow(2), time.monotonic, 3600.0
    with monkeypatch.context() as patched:
        patched.setattr("deltachain.publish.beside.time.time", lambda: now() + ahead)
        with beating(author):
            eventually(lambda: seen_in(author))
            first = present(seen_in(author))
            ahead = 0.0
            eventually(lambda: (seen_in(author) or first).time < first.time - 3000)


@pytest.mark.parametrize("why", ["no key", "another rank", "fenced"])
def test_a_publisher_writes_no_heartbeat(why: str) -> None:
    author = Author(NOBODY if why == "no key" else trust_of(1, key=1)).grow(2)
    head = author.parent
    if why == "fenced":
        author.grow(1)
        author.parent = head
    with beating(author, leads=why != "another rank"):
        time.sleep(0.2)
    assert author.store.find(HEARTBEAT_KEY) is None


def test_a_publisher_that_has_just_committed_renews_its_heartbeat_too() -> None:
    author = Author().grow(2)
    last = head_of(author)
    edge = Edge(kind="delta", base=1)
    fresh: Manifest = replace(
        last.manifest, version=2, parent=last.digest, edge=edge, time=time.time() + 5
    )
    author.parent = author.chain.commit(fresh)
    with beating(author):
        eventually(lambda: (seen_in(author) or heartbeat(0)).version == 2)


def test_a_heartbeat_that_cannot_be_written_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    author = Author().grow(2)

    def refuse(_key: str, _data: bytes) -> str:
        raise SignatureError("no", key=HEARTBEAT_KEY)

    monkeypatch.setattr(author.store, "put", refuse)
    writer = Writer(author.chain, numel=SPEC.numel, metadata={}, parent=author.parent)
    with closing(HeartbeatThread(writer, leads=True, every_s=0.02)) as thread:
        eventually(lambda: "no heartbeat" in caplog.text)
        time.sleep(0.1)
        assert caplog.text.count("no heartbeat") == 1
        assert thread.trouble == "no heartbeat: no"
        monkeypatch.undo()
        eventually(lambda: not thread.trouble)
        monkeypatch.setattr(author.store, "list", lambda _: 1 // 0)
        eventually(lambda: "division" in thread.trouble)  # any exception
        monkeypatch.undo()
        eventually(lambda: not thread.trouble)


@pytest.mark.parametrize("what", ["version", "heartbeat"])
def test_a_sign_of_the_future_is_none(what: str) -> None:
    author = Author().grow(2)
    if what == "version":
        last = head_of(author)
        edge = Edge(kind="delta", base=1)
        later = time.time() + 3600
        ahead = replace(last.manifest, version=2, parent=last.digest, edge=edge, time=later)
        author.parent = author.chain.commit(ahead)
    else:
        beat(author, age=-3600)
    follower = follower_of(author.store)
    with pytest.raises(StaleChainError, match="3600 s in the future") as caught:
        follower.subscriber.update()
    assert "set the clocks" in caught.value.hint


def test_the_status_doubts_a_chain_without_a_recent_sign() -> None:
    author = Author().grow(2)
    beat(author)
    follower = follower_of(author.store)
    follower.subscriber.update()
    assert follower.subscriber.status().doubt == ""
    beat(author, age=LIMIT_S + 1)
    assert "61 s old" in follower.subscriber.status().doubt


def test_the_status_doubts_a_mirror_that_lags_without_a_recent_sign() -> None:
    author = Author().grow(2)
    beat(author)
    follower = follower_of(author.store, mirror=True)
    follower.subscriber.update()
    older = author.chain.read(0)
    author.store.delete(manifest_key(1))
    beat(author, head=older)
    assert follower.subscriber.status().doubt == ""
    beat(author, age=LIMIT_S + 1, head=older)
    assert "61 s old" in follower.subscriber.status().doubt


def test_a_mirror_doubts_a_source_without_a_recent_sign() -> None:
    author, there = Author().grow(2), MemoryStore()
    trust = Trust(trusted=trust_of(1).trusted, max_age_s=LIMIT_S)
    with pytest.raises(StaleChainError, match="the last sign of its publisher"):
        list(Mirror(author.store, there, trust=trust).catch_up())
    assert there.find(manifest_key(1)) is not None  # everything is copied
    beat(author)
    list(Mirror(author.store, there, trust=trust).catch_up())
