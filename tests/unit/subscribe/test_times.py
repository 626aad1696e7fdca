"""Silence of a store: a fetch is none, unless its requests have no answer."""

from __future__ import annotations

import time

from deltachain.publish import Publisher
from deltachain.store import MemoryStore
from deltachain.subscribe import Subscriber
from deltachain.subscribe.subscriber import Times
from deltachain.types import Buffer
from tests.support.models import TinyModel, tensors_of

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
