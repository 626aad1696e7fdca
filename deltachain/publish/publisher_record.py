"""Record of the publisher at work: `publisher.json`, renewed while it is attached.

Nobody signs it and nothing safe depends on it: two publishers are kept apart by put-if-absent
(:mod:`deltachain.chain.commits`). It is there so that a second one that was started by mistake can
be refused before it fences the first, and so that errors can say who took a chain over.
"""

import itertools
import logging
import os
import re
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from typing import Final

from msgspec.structs import replace
from typing_extensions import override

from deltachain import errors
from deltachain.format.documents import Count, Document, dump, parse
from deltachain.format.keys import PUBLISHER_KEY
from deltachain.store import Store
from deltachain.threads import Closeable, started

logger = logging.getLogger(__name__)

MAX_RECORD: Final = 1 << 12  # size limit of a record, in bytes; anybody may have written it
LAST_SECOND: Final = 1 << 33  # seconds since 1970 up to which times can be shown
_HOST: Final = re.compile(r"[A-Za-z0-9._-]{1,255}")


class PublisherRecord(Document, frozen=True, kw_only=True):
    """Who publishes at a URL."""

    publisher: str
    turn: Count  # one more than in the record that it replaced
    host: str
    pid: Count
    machine: str  # boot of that host, and namespace of its processes; empty if unknown
    started: str  # start of its process, by the clock of that boot; empty if unknown
    since: float  # when it came, in seconds since 1970 on its clock
    renewals: Count = 0
    ended: bool = False

    def __post_init__(self) -> None:
        if not _HOST.fullmatch(self.host) or not 0 <= self.since <= LAST_SECOND:
            raise ValueError("no host or no time")

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since, UTC)
        return f"process {self.pid} on host {self.host}, since {since:%Y-%m-%d %H:%M:%S} UTC"

    @property
    def is_of_this_process(self) -> bool:
        there = (self.machine, self.pid, self.started)
        return bool(self.machine) and there == (_machine(), os.getpid(), _start_of(os.getpid()))

    @property
    def is_gone(self) -> bool:
        """Whether it was closed, or its process is known to have ended: one of this machine."""
        if self.ended:
            return True
        is_here = bool(self.machine) and self.machine == _machine()
        return is_here and _start_of(self.pid) != self.started


def new_record(before: PublisherRecord | None) -> PublisherRecord:
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:255]
    return PublisherRecord(
        publisher=uuid.uuid4().hex,
        turn=before.turn + 1 if before else 0,
        host=host or "-",
        pid=os.getpid(),
        machine=_machine(),
        started=_start_of(os.getpid()),
        since=time.time(),
    )


def read_record(store: Store) -> PublisherRecord | None:
    try:
        data = store.get(PUBLISHER_KEY, limit=MAX_RECORD)
        return parse(data, PublisherRecord, key=PUBLISHER_KEY)
    except (errors.ObjectNotFoundError, errors.FormatError):
        return None


def write_record(store: Store, record: PublisherRecord) -> PublisherRecord:
    """Write a record; return the one that renews it."""
    store.put(PUBLISHER_KEY, dump(record))
    return replace(record, renewals=record.renewals + 1)


def _machine() -> str:
    """Return what tells this boot of this machine, and this namespace of processes, from others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except (OSError, ValueError):
        return ""


def _start_of(pid: int) -> str:
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in {b"Z", b"X"} else fields[19].decode("ascii", "replace")


RENEW_S: Final = 10.0  # seconds between two renewals

LOOKS_EVERY: Final = 3  # renewals from one look at the chain to the next: a look costs two requests

WATCH_S: Final = 2.5 * RENEW_S  # seconds without a renewal after which a publisher counts as gone

LOOK_S: Final = 1.0
"""Seconds between two looks at another publisher's record; longer where a store asks for it."""


class Tenure(Closeable):
    """A publisher's record at a chain, which it renews from ``begin`` until ``close``.

    One that was killed needs no leave to come back: its record is seen not to be renewed.
    """

    def __init__(self, store: Store, *, take_over: bool) -> None:
        self.store = store
        self.lost = ""  # who took the chain over
        self.doubt = ""  # why the next version cannot be committed, as `look` found
        self.look: Callable[[], str] = lambda: ""
        self._takes_over = take_over
        self._record: PublisherRecord | None = None
        self._renewing = Event()  # set when it ends
        self._thread: Thread | None = None
        self._failed = False

    def begin(self) -> None:
        """Write the record, unless another publisher is at work."""
        before = None
        with suppress(errors.StorePermissionError):  # of credentials that read no such record
            before = read_record(self.store)
        if before is not None and not before.ended and not before.is_of_this_process:
            url = self.store.url
            if before.is_gone:
                logger.info("continues at %s after %s, which is gone", url, before)
            elif self._takes_over:
                logger.warning("takes %s over from %s, by take_over", url, before)
            else:
                self._watch(before)
                logger.info("continues at %s after %s, which gives no sign of life", url, before)
        self._record = record = new_record(before)
        self._write(record)
        thread = Thread(target=self._run, name="deltachain-tenure", daemon=True)
        self._thread = thread if started(thread) else None

    def name(self, error: errors.PublisherFencedError) -> None:
        """Add to an error who came after this publisher, if that one said so."""
        mine = self._record
        try:
            found = read_record(self.store)
        except errors.DeltaChainError:
            return
        if found is not None and mine is not None and found.publisher != mine.publisher:
            ended = ", which has ended by now" if found.ended else ""
            error.args = (f"{error.args[0]}; taken over by {found}{ended}",)

    @override
    def close(self) -> None:
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
        except errors.DeltaChainError as error:
            logger.debug("%s was not ended: %s", PUBLISHER_KEY, error)

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
                raise errors.PublisherFencedError(
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
        except errors.DeltaChainError:
            return True  # the store is away, which the next version tells
        if found is not None and found.publisher != mine.publisher and found.turn >= mine.turn:
            self.lost = f"{self.store.url} was taken over by {found}"
            logger.warning("%s", self.lost)
            return False
        self._write(mine)
        return True

    def _write(self, record: PublisherRecord) -> None:
        try:
            self._record = write_record(self.store, record)
        except errors.DeltaChainError as error:
            if not self._failed:
                logger.warning("no record that this publisher is at work: %s", error)
            self._failed = True
