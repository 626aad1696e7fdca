"""A mirror: the copy of a chain in another store, object by object and byte for byte."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Set
from itertools import chain as joined
from threading import Event
from typing import Final, Literal

from deltachain.chain.chain import Chain, Committed
from deltachain.chain.head_hint import MAX_HINT
from deltachain.chain.heartbeat import check_age
from deltachain.chain.identity import has_versions
from deltachain.chain.mirror_record import MirrorRecord, read_mirror
from deltachain.chain.trust import Trust
from deltachain.errors import (
    AlreadyExistsError,
    BrokenChainError,
    ChainMismatchError,
    ConfigError,
    ForkedChainError,
    FormatError,
    ObjectNotFoundError,
    StoreWentBackError,
)
from deltachain.format.digest import object_digest
from deltachain.format.documents import Head, dump, parse
from deltachain.format.keys import (
    CHAIN_KEY,
    HEAD_KEY,
    MIRROR_KEY,
    manifest_key,
    version_of,
)
from deltachain.format.prune_record import PruneRecord
from deltachain.mirror.contents import MirrorContents, VersionsToCopy
from deltachain.mirror.newcomers import check_newcomers
from deltachain.mirror.pipeline import CopyOutcome, CopyPipeline
from deltachain.mirror.placement import check_placement
from deltachain.mirror.plan import ObjectCopy, version_copies
from deltachain.mirror.pruned import delete_pruned, is_pruned
from deltachain.mirror.receipt import MirrorReceipt
from deltachain.mirror.records import SourceRecords
from deltachain.mirror.source import SourceDocuments, oldest_copied
from deltachain.store import Store
from deltachain.types import Version

logger = logging.getLogger(__name__)

SURVEY: Final = 64
"""Polls between two listings of both stores, for edges added late and for pruned payloads."""

LOOK_BACK: Final = 8
"""Polls between two checks that the source still has the newest version of the mirror."""

NAMED: Final = 4
"""Payloads named one by one as they are left out."""


class Mirror:
    """A copy of a chain in another store.

    Every object is proven before it is copied, and a document is copied after all that it names. So
    a mirror holds a chain at every moment, wherever the copying ended; the next start continues.

    Args:
        source: Store of the chain, or of another mirror of it.
        destination: Store of the mirror: empty, or filled by an earlier start.
        start: Copy payloads from the anchor that leads to this version, or to the head; by default
            all that the source copies if it is a mirror. Documents of all versions are copied.
        writer: Version of deltachain, for the record of the mirror.
        planned: Called with the size of objects that will be copied, in bytes: of all that a
            listing shows first, then of each that is found later.
        trust: Keys that check documents; those of a reader's environment if ``None``.

    Attributes:
        source: Store of the chain.
        destination: Store of the mirror.
        rounds: Polls so far, those that were left out included; surveys are due by it.
        version: The newest version of the mirror; -1 for none.
        head: The newest version seen in the source; -1 for none.
        chain: Id of the chain; ``None`` before the first round.
        left_out: Keys of payloads that the source does not have any more.
        is_copying: Whether objects are copied now.
    """

    def __init__(
        self,
        source: Store,
        destination: Store,
        *,
        start: Version | Literal["head"] | None = None,
        writer: str = "",
        planned: Callable[[int], None] = lambda _: None,
        trust: Trust | None = None,
    ) -> None:
        self.version: Version = -1
        self.head: Version = -1
        self.chain: str | None = None
        self.left_out: set[str] = set()
        self.is_copying = False
        self.source, self.destination, self.rounds = source, destination, 0
        self._start, self._writer, self._planned = start, writer, planned
        self._trust = trust or Trust.of_reader()
        self._contents = MirrorContents(destination)
        self._unproven: Set[str] = frozenset()
        self._listed: Set[str] = frozenset()
        self._in_source: Set[str] = frozenset()
        self._sent = set[str]()
        self._pruned: PruneRecord | None = None
        self._hinted: bytes | None = None
        self._is_whole = self._is_checked = False
        self._seen: Committed | None = None
        self._opened: tuple[Chain, MirrorRecord, SourceDocuments, SourceRecords] | None = None

    def catch_up(self, stop: Event | None = None) -> Iterator[MirrorReceipt]:
        """Copy what the mirror lacks, up to the head of the source; yield each version.

        Args:
            stop: Ends the copying early, at a moment that loses nothing.

        Raises:
            ObjectNotFoundError: The source has no chain yet.
            ConfigError: The destination is no mirror, or not any more.
            ChainMismatchError: The destination mirrors another chain.
            ForkedChainError: Source and mirror have different histories, or different prune or tag
                records of one number.
            StoreWentBackError: The source does not have the newest version of the mirror.
            SignatureError: No trusted key signed the chain, or a manifest or one that descends from
                it; nothing from there on is copied.
            FormatError: An object of the source is not what its document says; all before it is
                copied.
            BrokenChainError: Everything is copied, but payloads are missing in the source without
                which no newcomer can join the mirror.
            StoreError: A store failed.
        """
        stop = stop or Event()
        is_open = self._opened is not None
        chain, record, documents, records = self._opened = self._opened or self._open()
        if is_open and read_mirror(self.destination) != record:
            raise ConfigError(
                f"{self.destination.url} is not this mirror any more: {MIRROR_KEY} has changed",
                hint="it was promoted: a publisher may be at work there",
            )
        if not self._is_whole or not (self.rounds + 1) % LOOK_BACK:
            records.read_heartbeat()  # before the records that it names
        hint = self._read_hint(documents)
        head = self.head = self._newest(chain, documents)
        versions = VersionsToCopy(new=range(self.version + 1, head + 1))
        is_whole = self._is_whole and not self._contents.is_torn
        is_survey = not is_whole or not self.rounds % SURVEY
        if is_survey:
            records.look_again()
            versions = self._list(documents, head, record.first)
            records.check_same(self.destination)
        copies = self._copies(documents, versions, record.first, stop)
        if versions or is_survey or not self.rounds % LOOK_BACK:
            records.put_signatures(self.destination)
            self._pruned = records.newest_prune()
            tags = records.tags(documents.committed)
            copies = joined(documents.identity, records.prunes(), copies, tags)
        yield from self._run(self._lacking(copies), head, stop)
        if stop.is_set():
            return
        self._is_whole, self.version = True, self._contents.newest
        self._put_hint(*hint)
        records.put_heartbeat(self.destination, self.version)
        self._check_newcomers()
        if is_survey:
            self._follow_prunes(records)
        if self._seen is not None:
            check_age(chain, self._seen)

    def _open(self) -> tuple[Chain, MirrorRecord, SourceDocuments, SourceRecords]:
        """Open the source; create the record of the mirror, or check that it is of this chain."""
        chain, there, start = Chain.open(self.source, self._trust), self.destination, self._start
        check_placement(self.source, there)
        record = read_mirror(there)
        if record is None:
            if there.find(CHAIN_KEY) is not None or has_versions(there):
                raise ConfigError(
                    f"{there.url} has a chain, and is no mirror",
                    hint="give the mirror a URL of its own",
                )
            record = MirrorRecord(
                chain=chain.identity.chain,
                source=self.source.url,
                first=oldest_copied(chain, start),
                writer=self._writer,
            )
            try:
                there.put_if_absent(MIRROR_KEY, dump(record))
            except AlreadyExistsError:
                record = read_mirror(there) or record
        elif start not in (None, "head") and oldest_copied(chain, start) != record.first:
            raise ConfigError(
                f"{there.url} holds payloads from version {record.first} on, which is not the "
                f"start for version {start}",
                hint="leave out --from, or mirror to another URL",
            )
        if record.chain != chain.identity.chain:
            raise ChainMismatchError(
                f"{there.url} mirrors chain {record.chain}, {self.source.url} has "
                f"{chain.identity.chain}",
                hint="give every mirror a URL of its own",
            )
        self.chain = record.chain
        return (
            chain,
            record,
            SourceDocuments(chain, known=self._contents.read, has=self._has),
            SourceRecords(chain, has=self._has),
        )

    def _list(self, documents: SourceDocuments, head: Version, first: Version) -> VersionsToCopy:
        """List both stores; return the versions to copy."""
        identity = [copy.key for copy in documents.identity]
        found = self._contents.compare(
            self.source, first=first, head=head, identity=identity, is_first=not self._is_whole
        )
        documents.note_due(found.records)
        self._planned(sum(n for key, n in found.missing.items() if key not in self._listed))
        self._listed = found.missing.keys()
        self._in_source, self._unproven = found.payloads, found.unproven
        self.version = self._contents.newest
        self._check_same(head)
        return found.versions

    def _check_same(self, head: Version) -> None:
        """Check that the source has the newest version of the mirror."""
        if self.version < 0:
            return
        if head < self.version:
            raise StoreWentBackError(
                f"the source went back: its mirror {self.destination.url} has version "
                f"{self.version}, the newest of {self.source.url} is {head}",
                version=self.version,
            )
        known, key = self._contents.read(self.version), manifest_key(self.version)
        if known and object_digest(self.source.get(key)) != known.digest:
            raise ForkedChainError(
                f"version {self.version} of {self.source.url} differs from that of its mirror "
                f"{self.destination.url}",
                version=self.version,
                hint="two histories exist: find out which is right, and mirror to another URL",
            )

    def _newest(self, chain: Chain, documents: SourceDocuments) -> Version:
        """Return the newest version of the source; at times look back at both stores."""
        self.rounds, self._seen = self.rounds + 1, None
        if self.version >= 0 and self.rounds % LOOK_BACK:
            return chain.newest(self.version)
        self._seen = chain.head()
        newest = self._seen.version if self._seen else -1
        self._check_same(newest)
        self._contents.look_at([copy.key for copy in documents.identity])
        return newest

    def _copies(
        self, documents: SourceDocuments, versions: VersionsToCopy, first: Version, stop: Event
    ) -> Iterator[ObjectCopy]:
        """Yield the copies of versions, then of edge records that none of them lists."""
        healed = self._contents.among(versions)
        for found in documents.read(versions):
            if stop.is_set():
                return
            yield from version_copies(found, first=first)
        rest = (key for key in sorted(documents.due) if self._is_due(key, healed))
        for found in documents.read_records(rest):
            yield from version_copies(found, first=first)

    def _has(self, key: str) -> bool:
        """Return whether an object is in the mirror, or on its way there."""
        return key in self._sent or self._contents.has(key)

    def _is_due(self, key: str, healed: Set[Version]) -> bool:
        """Return whether an edge record, or a payload that it may name, is not in the mirror."""
        return key not in self._sent and (version_of(key) in healed or not self._has(key))

    def _lacking(self, copies: Iterable[ObjectCopy]) -> Iterator[ObjectCopy]:
        """Yield the copies that the mirror lacks, each once."""
        self._sent = set()
        for copy in copies:
            if copy.key not in self._in_source and is_pruned(copy, self._pruned):
                continue
            if copy.key not in self._sent and self._contents.lacks(copy.key, copy.nbytes):
                self._sent.add(copy.key)
                if copy.key not in self._listed:
                    self._planned(copy.nbytes)
                yield copy

    def _run(
        self, copies: Iterator[ObjectCopy], head: Version, stop: Event
    ) -> Iterator[MirrorReceipt]:
        """Copy objects, and yield a receipt of each version."""
        objects = nbytes = 0
        start = time.perf_counter()
        pipeline = CopyPipeline(
            self.source, self.destination, may_be_there=lambda copy: copy.key in self._unproven
        )

        def receipt() -> MirrorReceipt:
            return MirrorReceipt(
                version=self.version,
                head=head,
                objects=objects,
                nbytes=nbytes,
                left_out=len(self.left_out),
                seconds=time.perf_counter() - start,
            )

        self.is_copying = True
        try:
            for outcome in pipeline.run(copies, stop):
                if not self._note(outcome):
                    continue
                copy = outcome.copy
                objects, nbytes = objects + bool(outcome.nbytes), nbytes + outcome.nbytes
                if copy.version is not None and copy.key == manifest_key(copy.version):
                    self.version = max(self.version, copy.version)
                    yield receipt()
                    objects, nbytes, start = 0, 0, time.perf_counter()
            if objects and self.version >= 0:
                yield receipt()
        finally:
            self.is_copying = False

    def _note(self, outcome: CopyOutcome) -> bool:
        """Note what became of a copy; return whether the mirror has the object."""
        copy = outcome.copy
        if outcome.is_lost:
            if not self._is_pruned_now(copy):
                self._leave_out(copy.key)
            return False
        if outcome.is_other and self._opened:
            why = f"{copy.key} was made again in {self.source.url}, and is kept as it was before"
            self._opened[2].leave_out(copy.key, why)
        self._contents.add(copy.key, copy.nbytes)
        return True

    def _leave_out(self, key: str) -> None:
        """Note a payload that the source does not have any more; name the first ones."""
        self.left_out.add(key)
        self._is_checked = False
        if len(self.left_out) <= NAMED:
            more = "; more are counted at the end" if len(self.left_out) == NAMED else ""
            logger.warning("%s is gone from %s, and is left out%s", key, self.source.url, more)

    def _read_hint(self, documents: SourceDocuments) -> tuple[bytes, Head | None]:
        """Read the head hint of the source, and note the edge records that it lists."""
        try:
            data = self.source.get(HEAD_KEY, limit=MAX_HINT)
            hint = parse(data, Head, key=HEAD_KEY)
        except (ObjectNotFoundError, FormatError):
            return b"", None
        documents.note_edges(hint.anchors)
        return data, hint

    def _put_hint(self, data: bytes, hint: Head | None) -> None:
        """Put the head hint, unless it names a version that the mirror does not have."""
        if hint is None or hint.version > self.version or data == self._hinted:
            return
        self.destination.put(HEAD_KEY, data)
        self._hinted = data

    def _is_pruned_now(self, copy: ObjectCopy) -> bool:
        """Return whether a payload is pruned, if need be by a record that came meanwhile."""
        if not is_pruned(copy, self._pruned) and self._opened:
            self._pruned = self._opened[3].newest_prune()
        return is_pruned(copy, self._pruned)

    def _follow_prunes(self, records: SourceRecords) -> None:
        """Delete pruned payloads of the mirror that the source deleted."""
        record = records.newest_prune()
        gone = [key for key in self._contents.payloads if key not in self._in_source]
        if record is None or not gone or self.version < 0:
            return
        chain = Chain.open(self.destination, self._trust)
        try:
            deleted = delete_pruned(chain, self.source, self.version, record, frozenset(gone))
        except BrokenChainError as exc:
            logger.warning("nothing pruned is deleted from %s: %s", self.destination.url, exc)
            return
        for key in deleted:
            self._contents.remove(key)

    def _check_newcomers(self) -> None:
        """Check that newcomers can join the mirror, if payloads were left out since the last check.

        Raises:
            BrokenChainError: They cannot.
        """
        if self._is_checked or self.version < 0:
            return
        chain = Chain.open(self.destination, self._trust)
        check_newcomers(chain, self.version, self.left_out)
        self._is_checked = True
