"""Regular questions of a leader to its engine: whether it answers, and whether it is paused.

An idle engine that hangs, or that another client has paused, raises no error by itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from threading import Event
from typing import Final

from deltachain.errors import LeaderReplacedError, PartialApplyError
from deltachain.replica.target import ReplicaTarget

EVERY_S: Final = 5.0
"""Seconds between two questions, which every rank answers between two steps of the engine."""

EVERY_S_IF_PAUSED: Final = 0.5
"""The same while another client's pause keeps a replica from being ready."""

MAX_SILENCE_S: Final = 60.0
"""Seconds without an answer after which a replica is not ready; longer than an engine's step."""

logger = logging.getLogger(__name__)


class EngineWatch:
    """Questions to an engine, in a thread of their own.

    Args:
        target: The ranks of the engine.
        is_asleep: Returns whether the engine has released memory; it is not asked then.
        every_s: Seconds between two questions.
    """

    def __init__(
        self, target: ReplicaTarget, is_asleep: Callable[[], bool], *, every_s: float = EVERY_S
    ) -> None:
        self._target = target
        self._is_asleep = is_asleep
        self._every_s = every_s
        self._unanswered_since: float | None = None

    @property
    def fault(self) -> str:
        """Why the engine cannot be relied upon, without a request to it; empty if it can."""
        if self._target.engine.is_dead():
            return "the engine is dead"
        since = self._unanswered_since  # changes in the other thread
        silence_s = 0.0 if since is None else time.monotonic() - since
        if silence_s > MAX_SILENCE_S:
            return f"the engine has not answered for {silence_s:.0f} s"
        return ""

    def run(self, stop: Event) -> None:
        """Ask until ``stop`` is set.

        Raises:
            LeaderReplacedError: Another leader has attached the ranks since.
        """
        self._ask()
        while not stop.wait(self._wait_s):
            self._ask()

    @property
    def _wait_s(self) -> float:
        return min(self._every_s, EVERY_S_IF_PAUSED) if self._target.why_paused else self._every_s

    def _ask(self) -> None:
        if self._is_asleep():
            self._unanswered_since = None
            return
        is_first = self._unanswered_since is None
        if is_first:
            self._unanswered_since = time.monotonic()
        try:
            self._target.look()
        except LeaderReplacedError:
            raise
        except PartialApplyError:  # an answer: another client has an open update session
            self._unanswered_since = None
        except Exception as exc:  # noqa: BLE001 - engines raise plain exceptions
            if is_first:
                logger.warning("the engine did not answer: %s", exc)
        else:
            self._unanswered_since = None
