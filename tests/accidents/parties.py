"""Those who live with a chain: followers whose looks are counted, newcomers, a trainer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Semaphore, Thread
from typing import Any, Self

from torch import nn

from deltachain.checkpoint import WEIGHTS_FILE
from deltachain.errors import DeltaChainError
from deltachain.publish import PublishConfig, Publisher
from deltachain.store import Store
from deltachain.subscribe import SubscribeConfig, Subscriber
from deltachain.types import Version
from tests.accidents.copies import Kept
from tests.accidents.oracle import View
from tests.support.models import Replica, State, bits_of, train_

TURN_S = 120.0
"""Longest time that one look may take before the test fails."""


FAILURES = 3
"""Publishes in a row that fail before whoever trains looks at what they say."""


def words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


class Turns(Event):
    """Stands for what a following loop waits on: each wait ends when the test gives a turn."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.done = Semaphore(0), Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        del timeout
        self.done.release()
        self.go.acquire()
        return False


class Follower:
    """One process that follows a chain; it looks when the test lets it."""

    def __init__(self, who: str, replica: Replica, store: Store, **settings: Any) -> None:
        self.who, self.replica = who, replica
        config = SubscribeConfig(url=store.url, poll_s=0.001, **settings)
        self.subscriber = Subscriber(config, replica.target, store=store)
        self.turns = self.subscriber.told = Turns()
        self.said: list[str] = []
        self.looks = 0
        self.ended: BaseException | None = None
        self._now = ""
        self._stop, self._over = Event(), Event()
        self._thread = Thread(target=self._run, name=who, daemon=True)
        self._thread.start()

    def look(self, times: int = 1) -> Self:
        for _ in range(times):
            if self._over.is_set():  # the thread is alive for a moment longer
                break
            self.turns.go.release()
            assert self.turns.done.acquire(timeout=TURN_S), f"{self.who} hangs"
        return self

    @property
    def says(self) -> str:
        return words(self.ended) if self.ended is not None else self._now

    def view(self) -> View:
        lag = None
        with suppress(DeltaChainError):
            lag = self.subscriber.status().lag_versions
        held = self.subscriber.held
        return View(who=self.who, held=held, bits=self.bits(), says=self.says, lag=lag)

    def bits(self) -> State | None:
        target = self.replica.target
        empty = isinstance(target, Path) and not (target / WEIGHTS_FILE).exists()
        return None if empty else self.replica.bits()

    def close(self) -> None:
        self._stop.set()
        for _ in range(8):
            self.turns.go.release()
        self._thread.join(TURN_S)
        assert not self._thread.is_alive(), f"{self.who} hangs"
        self.subscriber.close()

    def _run(self) -> None:
        self.turns.go.acquire()
        try:
            for _ in self.subscriber.follow(stop=self._stop, looked=self._looked):
                pass
        except DeltaChainError as exc:
            self.ended = exc
            self.said.append(words(exc))
        finally:
            self._over.set()
            self.turns.done.release()

    def _looked(self, exc: DeltaChainError | None) -> None:
        self.looks += 1
        self._now = words(exc) if exc else ""
        if exc and self._now not in self.said:
            self.said.append(self._now)


class Trainer:
    """One process that trains a model and publishes it."""

    def __init__(
        self, model: nn.Module, store: Kept, note: Callable[[State], None], **settings: Any
    ) -> None:
        self.model, self.store, self._note = model, store, note
        self.said: list[str] = []
        self.says = ""
        self.known: dict[Version, str] = {}
        self.step = 0
        config = PublishConfig(url=store.url, on_error="warn", **settings)
        self.publisher = Publisher(config, store=store)

    def attach(self) -> Self:
        self._note(bits_of(self.model))
        try:
            self.publisher.attach(self.model)
        except DeltaChainError as exc:
            self._say(exc)
            raise
        self._remember()
        return self

    def publish(self, times: int = 1, *, first: int | None = None) -> Self:
        failures = 0
        for _ in range(times if self.publisher.epoch >= 0 else 0):
            self.step = self.step + 1 if first is None else first
            first = None
            train_(self.model, self.step, share=0.02)
            self._note(bits_of(self.model))
            try:
                future = self.publisher.publish(step=self.step)
                self.publisher.flush()
                error = future.exception(0) if future.done() else self.publisher._failure
            except DeltaChainError as exc:
                error = exc
            self._say(error)
            failures = failures + 1 if error else 0
            if error is None:
                self._remember()
            elif failures == FAILURES:
                break
        return self

    def _say(self, error: BaseException | None) -> None:
        self.says = words(error) if error else ""
        if error and self.says not in self.said:
            self.said.append(self.says)

    def close(self) -> None:
        self.says = ""
        with suppress(DeltaChainError):
            self.publisher.close()

    def _remember(self) -> None:
        session = self.publisher._session
        assert session is not None
        parent = session.writer.parent
        if parent is not None:
            self.known[parent.version] = parent.digest
