"""Thread of a publisher that renews the heartbeat while training is idle."""

from __future__ import annotations

import logging
import time
from threading import Event, Thread
from typing import Final

from deltachain.chain.heartbeat import write_heartbeat
from deltachain.errors import DeltaChainError
from deltachain.format.keys import manifest_key
from deltachain.publish.writer import Writer
from deltachain.threads import started

logger = logging.getLogger(__name__)

HEARTBEAT_S: Final = 30.0
"""Seconds after a commit or heartbeat until the next heartbeat."""


class HeartbeatThread:
    """Writes heartbeats between commits, if the writer has a signing key.

    A failed heartbeat is logged once; the next one is due as before.

    Args:
        writer: Writer of the chain.
        leads: Whether this rank commits.
        every_s: Seconds after a commit or heartbeat until the next heartbeat.
    """

    def __init__(self, writer: Writer, *, leads: bool, every_s: float = HEARTBEAT_S) -> None:
        self._writer = writer
        self._every_s = every_s
        self._last = 0.0
        self._failed = False
        self._stop = Event()
        self._thread = Thread(target=self._run, name="deltachain-heartbeat", daemon=True)
        signs = leads and writer.chain.trust.key is not None
        self._is_started = signs and started(self._thread)
        if signs and not self._is_started:
            logger.warning("no thread can be started for heartbeats of %s", writer.chain.store.url)

    def close(self) -> None:
        """End the thread; may be called again."""
        self._stop.set()
        if self._is_started:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s / 4):
            try:
                self._beat()
            except DeltaChainError as error:
                if not self._failed:
                    logger.warning("no heartbeat: %s", error)
                self._failed = True

    def _beat(self) -> None:
        """Write a heartbeat if one is due and no other publisher went on."""
        writer, now = self._writer, time.time()
        head = writer.parent
        if head is None or writer.uncertain:
            return
        if now - max(head.manifest.time, self._last) < self._every_s:
            return
        if writer.chain.store.find(manifest_key(head.version + 1)) is not None:
            return  # of a version in flight, or of a publisher that fenced this one
        write_heartbeat(writer.chain, head, now=now)
        self._last, self._failed = now, False
