"""A follower whose waits take no time."""

from collections.abc import Callable
from threading import Event

import pytest

from deltachain.subscribe import ApplyReceipt, Subscriber


class Clock:
    """Waits are counted, and something happens in each of them."""

    def __init__(self, subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch) -> None:
        self.subscriber = subscriber
        self.waits: list[float] = []
        self.happens: list[Callable[[], object]] = []
        self.stop = Event()
        monkeypatch.setattr(subscriber.told, "wait", self.wait)

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        if self.happens:
            self.happens.pop(0)()
        else:
            self.stop.set()
        return False

    def run(self, *, every_version: bool = False) -> list[ApplyReceipt]:
        """Follow until there is nothing left that could happen."""
        return list(self.subscriber.follow(stop=self.stop, every_version=every_version))
