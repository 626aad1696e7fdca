"""The draft of an engine, which follows a chain of its own.

A draft decides how fast an engine generates, never what: without its newest version the model's is
swapped in all the same.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from typing_extensions import override

from deltachain.errors import DeltaChainError
from deltachain.redact import redacted_url
from deltachain.subscribe.receipt import Staged
from deltachain.subscribe.subscriber import Subscriber
from deltachain.types import Version

from .pause import PauseHolds
from .settings import ReplicaSettings
from .target import ReplicaTarget

logger = logging.getLogger(__name__)


class _DraftHolds(PauseHolds):
    """The pause of the model's swap; a pause of its own if nothing of the model is swapped."""

    def __init__(self, model: PauseHolds) -> None:
        self._model, self._is_own = model, False

    @override
    def hold(self, *, in_doubt: bool = False) -> None:
        self._is_own = not self._model.held
        if self._is_own:
            self._model.hold()

    @override
    def go_on(self) -> None:
        if self._is_own:
            self._model.go_on()

    @override
    def doubt(self) -> None: ...

    @override
    def trust(self) -> None: ...


class DraftTarget(ReplicaTarget):
    """The drafts of all ranks as one target."""

    def __init__(self, model: ReplicaTarget, settings: ReplicaSettings) -> None:
        super().__init__(model.engine, settings.draft_url, settings.spool, of_draft=True)
        self.holds = _DraftHolds(model.holds)

    @override
    def name(self, version: Version) -> None: ...


class Draft:
    """Keeps the draft at the head of its chain, in the pauses of the model; methods log errors."""

    def __init__(self, settings: ReplicaSettings, model: ReplicaTarget) -> None:
        config = replace(settings.subscribe, url=settings.draft_url, base=None)
        self.subscriber = Subscriber(config, DraftTarget(model, settings))
        self.subscriber.whose = "the draft's "
        self._staged: Staged | None = None
        self._trouble, self._rests_until = "", 0.0

    def start(self) -> None:
        """Catch up; raise what keeps the draft from that."""
        self.subscriber.update()

    def stage(self) -> None:
        """Stage the newest version; a store that fails slowly takes a tenth of the model's time."""
        began = time.monotonic()
        if began < self._rests_until:
            return
        with self._telling():
            self._staged = self.subscriber.stage()
        if self._trouble:
            self._rests_until = time.monotonic() + 9 * (time.monotonic() - began)

    def swap(self) -> None:
        """Swap in what is staged, if anything is; nobody else writes to the model meanwhile."""
        staged, self._staged = self._staged, None
        if staged is not None:
            with self._telling():
                self.subscriber.swap(staged)

    def catch_up(self, alone: AbstractContextManager[Any]) -> None:
        """Stage and swap in the newest version; ``alone`` locks out swaps of the model."""
        self.stage()
        with alone:
            self.swap()

    def scrub(self) -> None:
        """Verify the live bits; wrong ones are replaced when the draft catches up."""
        with self._telling():
            self.subscriber.scrub()

    def status(self) -> dict[str, Any]:
        chain = self.subscriber.opened
        return {
            "url": redacted_url(self.subscriber.config.url),
            "version": self.subscriber.version,
            "head": chain.latest if chain else None,
            "trouble": self._trouble,
        }

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except Exception as exc:  # noqa: BLE001 - the model must not stay paused for it
            told = str(exc.args[0]) if isinstance(exc, DeltaChainError) else repr(exc)
            if told != self._trouble:
                logger.warning("the draft does not follow its chain: %s", told)
            self._trouble = told
        else:
            self._trouble = ""
