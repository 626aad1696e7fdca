"""Tenure: a publisher's time at a chain, told to others by a record that it renews."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread
from typing import Final

from msgspec.structs import replace
from typing_extensions import override

from deltachain.chain.publisher_record import (
    PublisherRecord,
    new_record,
    read_record,
    write_record,
)
from deltachain.errors import DeltaChainError, PublisherFencedError, StorePermissionError
from deltachain.format.keys import PUBLISHER_KEY
from deltachain.store import Store
from deltachain.threads import Closeable, started

logger = logging.getLogger(__name__)

RENEW_S: Final = 10.0
"""Seconds between two renewals."""

LOOKS_EVERY: Final = 3
"""Renewals from one look at the chain to the next: a look costs two requests."""

WATCH_S: Final = 2.5 * RENEW_S
"""Seconds without a renewal after which a publisher counts as gone."""

LOOK_S: Final = 1.0
"""Seconds between two looks at another publisher's record; longer where a store asks for it."""


class Tenure(Closeable):
    """A publisher's record at a chain, from ``begin`` until ``close``.

    A publisher that was killed needs no leave to come back: its record is not renewed, which is
    seen by looking twice. On the same machine its process is looked for instead.

    Attributes:
        lost: Who took the chain over; empty while nobody did.
        doubt: Why the next version cannot be committed, as the last look at the chain found.
        look: Looks at the chain, and returns that; for the thread of the tenure.
    """

    def __init__(self, store: Store, *, take_over: bool) -> None:
        self.store, self.lost, self.doubt = store, "", ""
        self.look: Callable[[], str] = lambda: ""
        self._takes_over = take_over
        self._record: PublisherRecord | None = None
        self._renewing = Event()  # set when it ends
        self._thread: Thread | None = None
        self._failed = False

    def begin(self) -> None:
        """Write the record, unless another publisher is at work.

        Raises:
            PublisherFencedError: One is, and this one was not told to take over.
        """
        before = None
        with suppress(StorePermissionError):  # of credentials that read no such record
            before = read_record(self.store)
        if before is not None and not before.ended and not before.is_of_this_process:
            self._replace(before)
        self._record = new_record(before)
        self._write()
        thread = Thread(target=self._run, name="deltachain-tenure", daemon=True)
        self._thread = thread if started(thread) else None

    def name(self, error: PublisherFencedError) -> None:
        """Add to an error who came after this publisher, if that one said so."""
        mine = self._record
        try:
            found = read_record(self.store)
        except DeltaChainError:
            return
        if found is not None and mine is not None and found.publisher != mine.publisher:
            ended = ", which has ended by now" if found.ended else ""
            error.args = (f"{error.args[0]}; taken over by {found}{ended}",)

    @override
    def close(self) -> None:
        """End the record, if it is still this publisher's; may be called again."""
        self._renewing.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        mine, self._record = self._record, None
        if mine is None:
            return
        try:
            found = read_record(self.store)
            if found is not None and found.publisher == mine.publisher:
                write_record(self.store, replace(mine, ended=True))
        except DeltaChainError as error:
            logger.debug("%s was not ended: %s", PUBLISHER_KEY, error)

    def _replace(self, before: PublisherRecord) -> None:
        url = self.store.url
        if before.is_gone:
            logger.info("goes on at %s after %s, which is gone", url, before)
        elif self._takes_over:
            logger.warning("takes %s over from %s, by take_over", url, before)
        else:
            self._watch(before)
            logger.info("goes on at %s after %s, which gives no sign of life", url, before)

    def _watch(self, before: PublisherRecord) -> None:
        """Return once another publisher is seen to be gone; refuse if it renewed its record."""
        seen, now = self.store.find(PUBLISHER_KEY), self.store.clock()
        if seen is None or (seen.modified and now and now - seen.modified > WATCH_S):
            return
        logger.warning(
            "%s is that of %s: looking for at most %g s whether that publisher is at work",
            self.store.url,
            before,
            WATCH_S,
        )
        end = time.monotonic() + WATCH_S
        while time.monotonic() < end:
            time.sleep(max(LOOK_S, self.store.capabilities.poll_s))
            found = read_record(self.store)
            if found is None or found.is_gone:
                return
            if found != before:
                raise PublisherFencedError(
                    f"{self.store.url} has a publisher at work: {found}; nothing was written",
                    hint="give this run a URL of its own, or stop that publisher first; to end it "
                    "by going on here, set PublishConfig(take_over=True), or push with --take-over",
                )

    def _run(self) -> None:
        for number in itertools.count(1):
            if self._renewing.wait(RENEW_S) or not self._renew():
                return
            if number % LOOKS_EVERY == 0:
                doubt = self.look()
                if doubt and doubt != self.doubt:
                    logger.warning("%s", doubt)
                self.doubt = doubt

    def _renew(self) -> bool:
        """Renew the record; return whether it is still this publisher's."""
        mine = self._record
        if mine is None:
            return False
        try:
            found = read_record(self.store)
        except DeltaChainError:
            return True  # the store is away, which the next version tells
        if found is not None and found.publisher != mine.publisher and found.turn >= mine.turn:
            self.lost = f"{self.store.url} was taken over by {found}"
            logger.warning("%s", self.lost)
            return False
        self._write()
        return True

    def _write(self) -> None:
        if self._record is None:
            return
        try:
            self._record = write_record(self.store, self._record)
        except DeltaChainError as error:
            if not self._failed:
                logger.warning("no record that this publisher is at work: %s", error)
            self._failed = True
