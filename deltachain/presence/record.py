"""Presence records: what a replica writes of itself, and what a reader makes of it."""

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final, Literal, TypeAlias

import msgspec

from deltachain import errors
from deltachain.format.documents import check_values, decode
from deltachain.status import Answer, Status
from deltachain.store import ObjectInfo, Store, open_store
from deltachain.threads import Closeable, Pool

LARGEST: Final = 1 << 18  # size limit of a record, in bytes
TEXT: Final = 500  # size limit of a text that a reader keeps, in characters

_COUNTS: Final = ("version", "staged", "head", "lag_versions")
_TIMES: Final = ("looked_at", "applied_at", "committed_at", "silence_s", "age_s")
_MOST: Final = (1 << 53) - 1


class PresenceRecord(Answer, frozen=True, kw_only=True):
    """The presence of one replica; nobody signs it, and a reader believes it no more than that."""

    presence: Literal[1] = 1  # number of this format
    time: float  # seconds since 1970, on the replica's clock; its age is by the store's
    status: Status  # the status of the replica, as its status route would answer
    software: dict[str, str] = msgspec.field(default_factory=dict)
    ended: str | None = None  # why; empty if it ended as it was told to, and null if it lives


@dataclass(frozen=True, slots=True)
class PresenceFound:
    status: Status
    age_s: float
    ended: str | None = None


def encode_record(record: PresenceRecord) -> bytes:
    """Return a record as JSON, without lists and receipt if it would be above ``LARGEST`` bytes."""
    data = msgspec.json.encode(record)
    if len(data) <= LARGEST:
        return data
    cut = {name: getattr(record.status, name)[:TEXT] for name in ("reason", "trouble")}
    brief = msgspec.structs.replace(
        record.status, **cut, ranks=[], on_host={}, classes={}, last=None
    )
    return msgspec.json.encode(msgspec.structs.replace(record, status=brief))


def parse_record(data: bytes, key: str) -> PresenceRecord:
    check_values(data, key)
    try:
        record = decode(data, PresenceRecord)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
        raise errors.MalformedError(f"no presence record: {str(exc)[:200]}", key=key) from exc
    status = record.status
    for name in (*_COUNTS, *_TIMES):
        number = getattr(status, name)
        if number is not None and not 0 <= number <= _MOST:  # nor is it NaN
            raise errors.MalformedError(f"no presence record: {name} is out of range", key=key)
    fields = {name: getattr(status, name) for name in status.__struct_fields__}
    cut = {name: text[:TEXT] for name, text in fields.items() if isinstance(text, str)}
    ended = record.ended[:TEXT] if record.ended else record.ended
    status = msgspec.structs.replace(status, **cut, ranks=[], on_host={}, classes={}, last=None)
    return msgspec.structs.replace(record, status=status, ended=ended, software={})


MOST: Final = 1024  # number of records that are read; a board with more has an error beside them
LISTED: Final = 10 * MOST  # number of objects that are listed

READERS: Final = 16

# What a record says, or why it says nothing.
Presence: TypeAlias = PresenceFound | errors.DeltaChainError


class PresenceBoard(Closeable):
    """Reader of all presence records at one URL; for one thread at a time.

    A look costs one listing, and one read for each record that changed; on the Hub, whose contents
    have names, the listing alone counts. One within the store's poll interval costs nothing.
    """

    def __init__(self, url: str) -> None:
        self._store = open_store(url)
        self.url = self._store.url
        self._known: dict[ObjectInfo, PresenceRecord | errors.DeltaChainError] = {}
        self._looked_at = -math.inf
        self._answers: Mapping[str, Presence] = {}

    def look(self) -> Mapping[str, Presence]:
        """Read all records; return by URL what each says, or what is wrong with it.

        Records of replicas that ended as they were told to are left out.
        """
        since_s = time.monotonic() - self._looked_at
        if since_s < self._store.capabilities.poll_s:
            return {
                name: replace(answer, age_s=answer.age_s + since_s)
                if isinstance(answer, PresenceFound)
                else answer
                for name, answer in self._answers.items()
            }
        self._answers = self._look()
        self._looked_at = time.monotonic()
        return self._answers

    def close(self) -> None:
        self._store.close()

    def _look(self) -> Mapping[str, Presence]:
        listed = list(islice(self._store.list(), LISTED))
        infos = [info for info in listed if "/" not in info.key and info.key.endswith(".json")]
        if not infos:
            raise errors.ControlPlaneError(
                f"{self.url} has no presence of a replica",
                hint="set DELTACHAIN_PRESENCE_URL to this URL where replicas start",
            )
        found = self._records(infos[:MOST])
        now = _clock(self._store, listed)
        answers: dict[str, Presence] = {}
        if len(infos) > MOST or len(listed) == LISTED:
            answers[self.url] = errors.ControlPlaneError(
                f"{self.url} has more than {MOST} records, of which others are not read",
                hint="remove those of replicas that are gone: a rule of the bucket can do so",
            )
        for info, record in found.items():
            name = f"{self.url}/{info.key.removesuffix('.json')}"
            if isinstance(record, errors.DeltaChainError):
                answers[name] = record
            elif record.ended != "":
                written = record.time if info.modified is None else info.modified
                answers[name] = PresenceFound(record.status, max(0.0, now - written), record.ended)
        return answers

    def _records(
        self, infos: Iterable[ObjectInfo]
    ) -> Mapping[ObjectInfo, PresenceRecord | errors.DeltaChainError]:
        wanted = list(infos)
        changed = [info for info in wanted if info not in self._known]
        with Pool(min(READERS, max(1, len(changed))), "deltachain-presence") as pool:
            read = dict(zip(changed, pool.map(self._read, changed), strict=True))
        every = {info: self._known.get(info) or read.get(info) for info in wanted}
        found = {info: record for info, record in every.items() if record is not None}
        self._known = {
            info: record
            for info, record in found.items()
            if info.modified is not None
            and isinstance(record, PresenceRecord | errors.MalformedError)
        }
        return found

    def _read(self, info: ObjectInfo) -> PresenceRecord | errors.DeltaChainError | None:
        try:
            if info.nbytes > LARGEST:
                raise errors.MalformedError(
                    f"no presence record: {info.nbytes} bytes, more than {LARGEST}", key=info.key
                )
            if info.pin:
                data = bytes(self._store.read(info.key, nbytes=info.nbytes, pin=info.pin))
            else:
                data = self._store.get(info.key, limit=LARGEST)
            return parse_record(data, info.key)
        except errors.ObjectNotFoundError:
            return None
        except errors.DeltaChainError as exc:
            return exc


def _clock(store: Store, listed: Iterable[ObjectInfo]) -> float:
    """Return the time by the store's clock, which no listed object can be ahead of."""
    now = store.clock()
    newest = max((info.modified for info in listed if info.modified is not None), default=0.0)
    return max(time.time() if now is None else now, newest)
