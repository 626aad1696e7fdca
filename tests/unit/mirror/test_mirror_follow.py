"""A mirror that follows, beside a publisher and subscribers."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from deltachain.errors import MirrorLagsError
from deltachain.mirror import Mirror, MirrorReceipt, follow
from deltachain.mirror import copies as flow
from deltachain.publish import PublishConfig, Publisher
from deltachain.subscribe import SubscribeConfig, Subscriber
from tests.support.faults import FaultyStore
from tests.support.models import bits_of, same, tensors_of, train_
from tests.support.values import eventually
from tests.unit.mirror.conftest import Pair, copy_of
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


def test_a_mirror_follows_a_running_publisher(pair: Pair) -> None:
    mirror = pair.mirror()
    with following(mirror) as receipts:  # started before the trainer
        time.sleep(0.05)
        config = PublishConfig(url=pair.source.url, anchor_every=5, when_busy="wait")
        with Publisher(config, store=pair.source).attach(pair.model) as publisher:
            for step in range(1, 31):
                train_(pair.model, step)
                publisher.publish(step=step)
        eventually(
            lambda: (
                mirror.version == 30 and copy_of(pair.source).keys() < copy_of(pair.there).keys()
            )
        )
        pair.check_newcomer()
    assert sorted({r.version for r in receipts}) == list(range(31))
    list(mirror.catch_up())
    pair.check()


def test_failures_are_logged_once_and_tried_again(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.grow(3)
    faulty = FaultyStore(pair.source)
    mirror = Mirror(faulty, pair.there)
    with caplog.at_level(logging.WARNING), following(mirror):
        eventually(lambda: mirror.version == 3)
        faulty.down = True
        eventually(lambda: "mirroring: " in caplog.text)
        pair.grow(2)
        faulty.down = False
        eventually(lambda: mirror.version == 6)
    assert caplog.text.count("mirroring: ") == 1


def test_stopping_loses_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.grow(9)
    monkeypatch.setattr(flow, "AHEAD", 4)
    stop, mirror = threading.Event(), pair.mirror()
    for receipt in mirror.catch_up(stop):
        if receipt.version == 4:
            stop.set()
    assert 4 <= mirror.version < 9
    list(mirror.catch_up())
    pair.check()


def test_a_subscriber_goes_from_the_source_to_a_mirror(pair: Pair) -> None:
    pair.grow(3)
    tensors = tensors_of(pair.model)
    first = Subscriber("memory://unused", tensors, store=pair.source)
    first.update()
    pair.grow(4)
    pair.copy()
    second = Subscriber(SubscribeConfig(url="memory://unused"), tensors, store=pair.there)
    receipt = second.update()
    assert receipt is not None
    assert receipt.previous == 4  # the publisher that was started again began with these bits
    assert second.version == 8
    assert same(bits_of(tensors), bits_of(pair.model))


def test_a_follower_ahead_of_its_mirror_waits(
    pair: Pair, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.grow(3)
    mirror = pair.mirror()
    list(mirror.catch_up())
    pair.grow(3)
    folder = f"{tmp_path}/weights"
    with Subscriber("memory://unused", folder, store=pair.source) as first:
        first.update()
    config = SubscribeConfig(url="memory://unused", poll_s=0.001, mirror=True)
    follower = Subscriber(config, folder, store=pair.there)
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
    pair.grow(1)
    list(mirror.catch_up())
    assert told.run(nothing)[-1] == 9
    follower.close()
