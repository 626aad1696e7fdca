"""Prune records of a chain in its store: lookup of the newest one."""

from __future__ import annotations

from deltachain.chain.checks import read_document
from deltachain.chain.lookup import NONE, newest_number
from deltachain.chain.trust import Trust
from deltachain.errors import FormatError, MalformedError, ObjectNotFoundError
from deltachain.format.documents import EdgeSummary, PruneRecord
from deltachain.format.keys import prune_key
from deltachain.store import Store
from deltachain.types import Version


class Prunes:
    """The prune records of one chain, numbered from 0 without gaps.

    Args:
        store: Store of the records.
        chain: Id of the chain.
        trust: Keys that sign and check records.
    """

    def __init__(self, store: Store, chain: str, trust: Trust) -> None:
        self._store = store
        self._chain = chain
        self._trust = trust
        self._newest: PruneRecord | None = None

    def newest(self) -> PruneRecord | None:
        """Read the newest record; ``None`` before the first.

        Takes a logarithmic number of lookups the first time, and one while there is no newer one.

        Raises:
            FormatError: The record is damaged or under the key of another.
            SignatureError: No trusted key signed it.
        """
        known = self._newest.number if self._newest else NONE
        number = newest_number(self._store, prune_key, known=known)
        if number > known:
            self._newest = self.read(number)
        return self._newest

    def newest_there(self) -> PruneRecord | None:
        """Read the newest record, also if the one known so far was lost or replaced meanwhile.

        That happens as a store is restored from a backup. Reads that record again each time, so it
        is for maintainers. Raises as :meth:`newest`.
        """
        if self._newest is not None:
            try:
                self._newest = self.read(self._newest.number)
            except ObjectNotFoundError:
                self._newest = None
        return self.newest()

    def read(self, number: int) -> PruneRecord:
        """Read a record; once more if it is damaged.

        Raises:
            ObjectNotFoundError: There is no such record.
            FormatError: The record is damaged, under the key of another, or of another chain.
        """
        key = prune_key(number)
        kind, chain = PruneRecord, self._chain
        record, _ = read_document(self._store, key, kind, chain=chain, trust=self._trust)
        if record.number != number:
            raise MalformedError(f"{key}: is prune record {record.number}", key=key)
        return record

    @property
    def names_edges(self) -> bool:
        """Whether the newest record that was read names any edge."""
        return self._newest is not None and bool(self._newest.pruned)

    def is_pruned(self, edge: EdgeSummary) -> bool:
        """Return whether the newest record that was read names an edge."""
        return self._newest is not None and self._newest.covers(edge)

    def names(self, kind: str, base: Version | None, version: Version) -> bool:
        """Return whether the newest record that was read names an edge, which need not exist."""
        newest = self._newest
        return newest is not None and newest.range_of(kind, base, version) is not None

    def is_closed(self, version: Version) -> bool:
        """Return whether the newest record that was read closes a version to further edges."""
        return self._newest is not None and self._newest.closes(version)

    def refresh(self, *, there: bool = False) -> None:
        """Read the newest record, if it is readable: planning does without it.

        Args:
            there: Whether to read it as :meth:`newest_there` does.
        """
        try:
            self.newest_there() if there else self.newest()
        except (FormatError, ObjectNotFoundError):
            return
