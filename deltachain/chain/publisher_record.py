"""Record of the publisher at work: `publisher.json`, renewed while it is attached.

Nobody signs it and nothing safe depends on it: two publishers are kept apart by put-if-absent
(:mod:`deltachain.chain.commits`). It is there so that a second one that was started by mistake can
be refused before it fences the first, and so that errors can say who took a chain over.
"""

import os
import re
import socket
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from deltachain.errors import FormatError, ObjectNotFoundError
from deltachain.format.documents import Count, Document, dump, parse
from deltachain.format.keys import PUBLISHER_KEY
from deltachain.store import Store

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
    except (ObjectNotFoundError, FormatError):
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
