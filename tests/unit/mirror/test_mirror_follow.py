"""A mirror that follows, beside a publisher and subscribers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from deltachain.errors import ForkedChainError, MirrorLagsError
from deltachain.format.keys import MIRROR_KEY, manifest_key
from deltachain.mirror import Mirror, MirrorReceipt, follow
from deltachain.mirror import copies as flow
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import MemoryStore
from deltachain.subscribe import SubscribeConfig, Subscriber
from tests.support.faults import FaultyStore
from tests.support.models import TinyModel, bits_of, same, tensors_of, train_
from tests.unit.mirror.conftest import Grow, copy_of
from tests.unit.subscribe.accidents import Told, nothing
from tests.unit.subscribe.clock import Clock


@contextmanager
def following(mirror: Mirror, poll_s: float = 0.001) -> Iterator[list[MirrorReceipt]]:
    """Run the loop of a mirror in a thread."""
    stop, receipts, failures = threading.Event(), list[MirrorReceipt](), list[BaseException]()

    def run() -> None:
        try:
            for receipt in follow(mirror, stop=stop, poll_s=poll_s):
                receipts.append(receipt)
        except BaseException as exc:  # noqa: BLE001 - raised below
            failures.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield receipts
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_mirror_follows_a_running_publisher(
    source: MemoryStore, mirror_store: MemoryStore, model: TinyModel
) -> None:
    mirror = Mirror(source, mirror_store)
    tensors = tensors_of(model)
    with following(mirror) as receipts:  # started before the trainer
        time.sleep(0.05)
        config = PublishConfig(url=source.url, anchor_every=5, when_busy="wait")
        with Publisher(config, store=source).attach(model) as publisher:
            for step in range(1, 31):
                train_(model, step)
                publisher.publish(step=step)
        until(
            lambda: mirror.version == 30 and copy_of(source).keys() < copy_of(mirror_store).keys()
        )
        subscriber = Subscriber("memory://unused", tensors, store=mirror_store)
        subscriber.update()
        assert subscriber.version == 30
    assert same(bits_of(tensors), bits_of(model))
    assert sorted({r.version for r in receipts}) == list(range(31))
    list(mirror.catch_up())
    found = copy_of(mirror_store)
    found.pop(MIRROR_KEY)
    assert found == copy_of(source)


def test_failures_are_logged_once_and_tried_again(
    source: MemoryStore, mirror_store: MemoryStore, grow: Grow, caplog: pytest.LogCaptureFixture
) -> None:
    grow(3)
    faulty = FaultyStore(source)
    mirror = Mirror(faulty, mirror_store)
    with caplog.at_level(logging.WARNING), following(mirror):
        until(lambda: mirror.version == 3)
        faulty.down = True
        until(lambda: "mirroring: " in caplog.text)
        grow(2)
        faulty.down = False
        until(lambda: mirror.version == 6)
    assert caplog.text.count("mirroring: ") == 1


def test_a_fork_ends_the_loop(source: MemoryStore, mirror_store: MemoryStore, grow: Grow) -> None:
    grow(3)
    mirror = Mirror(source, mirror_store)
    list(mirror.catch_up())
    mirror_store.put(manifest_key(4), b"{}")
    grow(1)
    with pytest.raises(ForkedChainError), following(mirror):
        time.sleep(0.3)


def test_stopping_loses_nothing(
    source: MemoryStore, mirror_store: MemoryStore, grow: Grow, monkeypatch: pytest.MonkeyPatch
) -> None:
    grow(9)
    monkeypatch.setattr(flow, "AHEAD", 4)
    stop, mirror = threading.Event(), Mirror(source, mirror_store)
    for receipt in mirror.catch_up(stop):
        if receipt.version == 4:
            stop.set()
    assert 4 <= mirror.version < 9
    list(mirror.catch_up())
    found = copy_of(mirror_store)
    found.pop(MIRROR_KEY)
    assert found == copy_of(source)


def test_a_subscriber_goes_from_the_source_to_a_mirror(
    source: MemoryStore, mirror_store: MemoryStore, grow: Grow, model: TinyModel
) -> None:
    grow(3)
    tensors = tensors_of(model)
    first = Subscriber("memory://unused", tensors, store=source)
    first.update()
    grow(4)
    list(Mirror(source, mirror_store).catch_up())
    second = Subscriber(SubscribeConfig(url="memory://unused"), tensors, store=mirror_store)
    receipt = second.update()
    assert receipt is not None
    assert receipt.previous == 4  # the publisher that was started again began with these bits
    assert second.version == 8
    assert same(bits_of(tensors), bits_of(model))


def test_a_follower_ahead_of_its_mirror_waits(
    source: MemoryStore,
    mirror_store: MemoryStore,
    grow: Grow,
    tmp_path: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grow(3)
    mirror = Mirror(source, mirror_store)
    list(mirror.catch_up())
    grow(3)
    folder = f"{tmp_path}/weights"
    with Subscriber("memory://unused", folder, store=source) as first:
        first.update()
    config = SubscribeConfig(url="memory://unused", poll_s=0.001, mirror=True)
    follower = Subscriber(config, folder, store=mirror_store)
    told = Told(follower, Clock(follower, monkeypatch))
    with pytest.raises(
        MirrorLagsError, match=r"the mirror lags: version 7 is held, the newest .* 3"
    ):
        follower.update()
    assert told.run(nothing) == []
    wrong = {type(exc) for exc in told.said if exc is not None}
    assert wrong == {MirrorLagsError}
    assert set(told.doubts) == {None}
    assert follower.status().doubt == ""
    list(mirror.catch_up())
    assert told.run(nothing) == []
    assert told.said[-1] is None
    grow(1)
    list(mirror.catch_up())
    assert told.run(nothing)[-1] == 9
    follower.close()


def holds(mirror: Mirror, version: int) -> bool:
    return mirror.version == version
