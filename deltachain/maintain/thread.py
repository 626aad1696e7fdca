"""Thread that maintains a chain beside its publisher."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event, Thread
from typing import Final

from deltachain.errors import DeltaChainError
from deltachain.maintain.maintainer import Maintainer

logger = logging.getLogger(__name__)

EVERY_S: Final = 30.0
"""Seconds between two rounds."""


class MaintainerThread:
    """Runs rounds of maintenance until it is closed; a failed round is logged and tried again.

    Args:
        make: Function that opens the chain, called in the thread.
        every_s: Seconds between two rounds.
    """

    def __init__(self, make: Callable[[], Maintainer], *, every_s: float = EVERY_S) -> None:
        self._make, self._every_s = make, every_s
        self._stop = Event()
        self._thread = Thread(target=self._run, name="deltachain-maintain", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread after the current round; may be called again."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        maintainer: Maintainer | None = None
        said = ""
        while not self._stop.wait(self._every_s if maintainer else 0):
            try:
                maintainer = maintainer or self._make()
                done = maintainer.round()
            except DeltaChainError as error:
                if str(error) != said:
                    said = str(error)
                    logger.warning("maintenance failed, the next round tries again: %s", error)
                self._stop.wait(self._every_s)
                continue
            said = ""
            if done is not None and (done.skips or done.anchors):
                logger.info(
                    "maintained version %d: %d skips, %d anchors added",
                    done.head,
                    len(done.skips),
                    len(done.anchors),
                )
        if maintainer is not None:
            maintainer.chain.store.close()
