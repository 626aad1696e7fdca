"""Board of presences: all records at one URL, read as they come from anybody."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Final, TypeAlias

from typing_extensions import override

from deltachain.errors import (
    ControlPlaneError,
    DeltaChainError,
    MalformedError,
    ObjectNotFoundError,
)
from deltachain.presence.record import LARGEST, PresenceFound, PresenceRecord, parse_record
from deltachain.store import ObjectInfo, Store, open_store
from deltachain.threads import Closeable, Pool

MOST: Final = 1024
"""Number of records that are read; a board with more has an error beside them."""

LISTED: Final = 10 * MOST
"""Number of objects that are listed."""

READERS: Final = 16

Presence: TypeAlias = PresenceFound | DeltaChainError
"""What a record says, or why it says nothing."""


class PresenceBoard(Closeable):
    """Reader of all presence records at one URL; for one thread at a time.

    A look costs one listing, and one read for each record that changed since the look before; on
    the Hub, whose contents have names, the listing alone counts. A look sooner than the store's
    poll interval after another one has the same answers, which are older by then.

    Args:
        url: URL of the records.

    Attributes:
        url: URL of the records, without credentials.

    Raises:
        ConfigError: The URL is invalid.
    """

    def __init__(self, url: str) -> None:
        self._store = open_store(url)
        self.url = self._store.url
        self._known: dict[ObjectInfo, PresenceRecord | DeltaChainError] = {}
        self._looked_at = -math.inf
        self._answers: Mapping[str, Presence] = {}

    def look(self) -> Mapping[str, Presence]:
        """Read all records; return what each says, by its URL.

        Records of replicas that ended as they were told to are left out. What is wrong with one of
        them is in its place; what is wrong with the board is under its URL.

        Raises:
            StoreError: The store cannot be listed.
            ControlPlaneError: There is no record.
        """
        since_s = time.monotonic() - self._looked_at
        if since_s < self._store.capabilities.poll_s:
            return {name: _older(answer, since_s) for name, answer in self._answers.items()}
        self._answers = self._look()
        self._looked_at = time.monotonic()
        return self._answers

    @override
    def close(self) -> None:
        """Close connections; idempotent."""
        self._store.close()

    def _look(self) -> Mapping[str, Presence]:
        listed = list(islice(self._store.list(), LISTED))
        infos = [info for info in listed if "/" not in info.key and info.key.endswith(".json")]
        if not infos:
            raise ControlPlaneError(
                f"{self.url} has no presence of a replica",
                hint="set DELTACHAIN_PRESENCE_URL to this URL where replicas start",
            )
        found = self._records(infos[:MOST])
        now = _clock(self._store, listed)
        answers: dict[str, Presence] = {}
        if len(infos) > MOST or len(listed) == LISTED:
            answers[self.url] = ControlPlaneError(
                f"{self.url} has more than {MOST} records, of which others are not read",
                hint="remove those of replicas that are gone: a rule of the bucket can do so",
            )
        for info, record in found.items():
            name = f"{self.url}/{info.key.removesuffix('.json')}"
            if isinstance(record, DeltaChainError):
                answers[name] = record
            elif record.ended != "":
                written = record.time if info.modified is None else info.modified
                answers[name] = PresenceFound(record.status, max(0.0, now - written), record.ended)
        return answers

    def _records(
        self, infos: Iterable[ObjectInfo]
    ) -> Mapping[ObjectInfo, PresenceRecord | DeltaChainError]:
        """Read the records that are not known yet; forget those that are gone."""
        wanted = list(infos)
        changed = [info for info in wanted if info not in self._known]
        with Pool(min(READERS, max(1, len(changed))), "deltachain-presence") as pool:
            read = dict(zip(changed, pool.map(self._read, changed), strict=True))
        every = {info: self._known.get(info) or read.get(info) for info in wanted}
        found = {info: record for info, record in every.items() if record is not None}
        self._known = {info: record for info, record in found.items() if _is_final(info, record)}
        return found

    def _read(self, info: ObjectInfo) -> PresenceRecord | DeltaChainError | None:
        """Read one record; ``None`` if it was removed meanwhile."""
        try:
            if info.nbytes > LARGEST:
                raise MalformedError(
                    f"no presence record: {info.nbytes} bytes, more than {LARGEST}", key=info.key
                )
            if info.pin:
                data = bytes(self._store.read(info.key, nbytes=info.nbytes, pin=info.pin))
            else:
                data = self._store.get(info.key, limit=LARGEST)
            return parse_record(data, info.key)
        except ObjectNotFoundError:
            return None
        except DeltaChainError as exc:
            return exc


def _older(answer: Presence, seconds: float) -> Presence:
    if isinstance(answer, PresenceFound):
        return replace(answer, age_s=answer.age_s + seconds)
    return answer


def _is_final(info: ObjectInfo, record: PresenceRecord | DeltaChainError) -> bool:
    """Return whether the same object need not be read again."""
    if isinstance(record, DeltaChainError):
        return isinstance(record, MalformedError) and info.modified is not None
    return info.modified is not None


def _clock(store: Store, listed: Iterable[ObjectInfo]) -> float:
    """Return the time by the store's clock, which no listed object can be ahead of."""
    now = store.clock()
    newest = max((info.modified for info in listed if info.modified is not None), default=0.0)
    return max(time.time() if now is None else now, newest)
