"""A mirror: the copy of a chain in another store, object by object and byte for byte."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Final, Literal
from urllib.parse import urlsplit
from urllib.request import url2pathname

from deltachain import errors
from deltachain.chain.chain import Chain, Committed, plan_present
from deltachain.chain.heartbeat import check_age
from deltachain.chain.identity import (
    MirrorRecord,
    chain_around,
    has_versions,
    lost_chain,
    read_mirror,
)
from deltachain.chain.manifests import MAX_HINT, NONE
from deltachain.chain.tags import VersionChoice, choose
from deltachain.chain.trust import Trust
from deltachain.format import documents, keys
from deltachain.format.keys import object_digest
from deltachain.metrics import Figure, figures, info
from deltachain.mirror.copies import CopyOutcome, CopyPipeline, ObjectCopy
from deltachain.mirror.source import SourceDocuments, newest_prune
from deltachain.store import ObjectInfo, Store
from deltachain.subscribe.follow_loop import Round, repeat
from deltachain.threads import Pool
from deltachain.types import Version

DELETES: Final = 8  # objects deleted at a time
SURVEY: Final = 64
"""Polls between two listings of both stores, for edges added late and for pruned payloads."""

LOOK_BACK: Final = 8
"""Polls between two checks that the source still has the newest version of the mirror."""

NAMED: Final = 4  # payloads named one by one as they are left out
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorReceipt:
    """What one version took to be copied.

    Attributes:
        version: The newest version of the mirror.
        head: The newest version of the source, when this round began.
        objects: Number of objects copied since the last receipt.
        nbytes: Their size, in bytes.
        left_out: Number of payloads named so far that the source does not have any more.
        seconds: Time since the last receipt.
    """

    version: Version
    head: Version
    objects: int
    nbytes: int
    left_out: int
    seconds: float

    @property
    def lag_versions(self) -> int:
        """Number of versions of the source that the mirror does not have yet."""
        return self.head - self.version


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
        planned: Called with the size of objects that will be copied, in bytes.
        trust: Keys that check documents; those of a reader's environment if ``None``.

    Attributes:
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
        self._opened: tuple[Chain, MirrorRecord, SourceDocuments] | None = None
        self._listed_head: Version = -1
        self._missing: dict[str, ObjectInfo] = {}  # in the mirror, without manifests
        self._extra, self._records, self._prune = set[str](), set[str](), NONE
        self._sent = set[str]()
        self._put: dict[str, bytes] = {}
        self._pruned: documents.PruneRecord | None = None
        self._stay = 0
        self._is_whole = self._is_joinable = False

    def catch_up(self, stop: Event | None = None) -> Iterator[MirrorReceipt]:
        """Copy what the mirror lacks, up to the head of the source; yield each version.

        Args:
            stop: Ends the copying early, at a moment that loses nothing.

        Raises:
            NoChainError: The source has no chain yet.
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
        chain, record, origin = self._opened = self._open()
        self.rounds += 1
        is_survey = not self._is_whole or not self.rounds % SURVEY
        looks_back = is_survey or self.version < 0 or not self.rounds % LOOK_BACK
        heartbeat = origin.heartbeat() if looks_back else None  # before what it names
        data, hint = self._read_hint()
        newest = chain.head() if looks_back else None
        self.head = newest.version if newest else -1
        if not looks_back:
            self.head = chain.newest(self.version)
        if is_survey:
            self._survey(record.first)
        if looks_back:
            self._check_same()
        copies = self._copies(chain, origin, hint, looks_back=looks_back, is_survey=is_survey)
        yield from self._run(copies, stop)
        if stop.is_set():
            return
        self._is_whole = True
        hinted = (hint.version, data) if hint else None
        for key, found in ((keys.HEAD_KEY, hinted), (keys.HEARTBEAT_KEY, heartbeat)):
            if found is not None and found[0] <= self.version:
                self._put_anew(key, found[1])
        self._tidy(is_survey=is_survey)
        if newest is not None:
            check_age(chain, newest)

    def _open_source(self, *, is_new: bool) -> Chain:
        try:
            return Chain.open(self.source, self._trust)
        except errors.NoChainError:
            if is_new:
                raise
            raise lost_chain(self.source.url) from None

    def _open(self) -> tuple[Chain, MirrorRecord, SourceDocuments]:
        """Open both sides; or, if they are open, check that the mirror is still one."""
        if self._opened is not None:
            if read_mirror(self.destination) == self._opened[1]:
                return self._opened
            raise errors.ConfigError(
                f"{self.destination.url} is not this mirror any more: {keys.MIRROR_KEY} changed",
                hint="it was promoted: a publisher may be at work there",
            )
        there, start = self.destination, self._start
        record = read_mirror(there)
        chain = self._open_source(is_new=record is None)
        check_placement(self.source, there)
        if record is None:
            if there.find(keys.CHAIN_KEY) is not None or has_versions(there):
                raise errors.ConfigError(
                    f"{there.url} has a chain, and is no mirror",
                    hint="give the mirror a URL of its own",
                )
            record = MirrorRecord(
                chain=chain.identity.chain,
                source=self.source.url,
                first=_oldest_copied(chain, start),
                writer=self._writer,
            )
            try:
                there.put_if_absent(keys.MIRROR_KEY, documents.dump(record))
            except errors.AlreadyExistsError:
                record = read_mirror(there) or record
        elif start not in (None, "head") and _oldest_copied(chain, start) != record.first:
            raise errors.ConfigError(
                f"{there.url} holds payloads from version {record.first} on, which is not the "
                f"start for version {start}",
                hint="leave out --from, or mirror to another URL",
            )
        if record.chain != chain.identity.chain:
            raise errors.ChainMismatchError(
                f"{there.url} mirrors chain {record.chain}, {self.source.url} has "
                f"{chain.identity.chain}",
                hint="give every mirror a URL of its own",
            )
        self.chain = record.chain
        known, has = self._read_manifest, lambda key: key in self._sent or key in self._records
        return chain, record, SourceDocuments(chain, record.first, known=known, has=has)

    def _survey(self, first: Version) -> None:
        """List both stores; manifests only at first, and if the newest one is gone.

        Empty documents of the mirror count as absent: no document of a chain is empty, and some S3
        servers keep an empty object of a writer that was killed between header and body.
        """
        newest = self.destination.find(keys.manifest_key(max(self.version, 0)))
        if not self._is_whole or newest is None or not newest.nbytes:
            self.version = -1
            for info in self.destination.list(keys.MANIFEST_PREFIX):
                if info.nbytes and keys.version_of(info.key) == self.version + 1:
                    self.version += 1  # a version after a gap is copied again
        prefixes = (*keys.PAYLOADS, keys.EDGE_PREFIX, keys.PRUNE_PREFIX, keys.TAG_PREFIX)
        source = {info.key: info for prefix in prefixes for info in self.source.list(prefix)}
        there = {i.key: i.nbytes for prefix in prefixes for i in self.destination.list(prefix)}
        self._missing = {
            key: info
            for key, info in source.items()
            if there.get(key) != info.nbytes
            and not (key.startswith(keys.PAYLOADS) and (keys.version_of(key) or 0) < first)
        }
        self._records = {key for key in there if not key.startswith(keys.PAYLOADS) and there[key]}
        self._extra = {key for key in there if key.startswith(keys.PAYLOADS)} - source.keys()
        same = (keys.prune_of(key) for key in source.keys() & there.keys() - self._missing.keys())
        self._prune = max((number for number in same if number is not None), default=NONE)
        self._listed_head = self.head
        if not self._is_whole:
            self._planned(sum(info.nbytes for info in self._missing.values()))

    def _identity(self, origin: SourceDocuments) -> Iterator[ObjectCopy]:
        copies = list(origin.identity())
        found = self.destination.find_all(copy.key for copy in copies)
        for copy in copies:
            if copy.key not in found or found[copy.key].nbytes != copy.nbytes:
                yield copy

    def _copies(
        self,
        chain: Chain,
        origin: SourceDocuments,
        hint: documents.Head | None,
        *,
        looks_back: bool,
        is_survey: bool,
    ) -> Iterator[ObjectCopy]:
        """Yield all that the mirror may lack, in the order of dependence."""
        is_due = looks_back or self.head > self.version
        if is_due:
            self._put_signatures(origin)
            self._pruned = newest_prune(chain)
        if is_survey or (looks_back and self.version >= 0):
            yield from self._identity(origin)
        if is_due:
            prunes = {self._prune, *map(keys.prune_of, self._missing)} if is_survey else ()
            yield from origin.prunes(self._prune, prunes)
        records = dict[str, ObjectInfo]()
        if is_survey:
            records = {k: i for k, i in self._missing.items() if k.startswith(keys.EDGE_PREFIX)}
            lost = (key for key in self._missing if key.startswith(keys.PAYLOADS))
            torn = {keys.version_of(key) or 0 for key in lost}
            torn = {version for version in torn if version <= self.version}
            for version in torn:  # which may lack parts of any edge
                infos = self.source.list(f"{keys.EDGE_PREFIX}{version:020d}/")
                records |= {info.key: info for info in infos}
            for version in sorted(torn):
                yield from origin.versions(version, min(version, self.head))
        yield from origin.versions(self.version + 1, self.head)
        records |= self._hinted_records(hint)
        yield from origin.records(records.values())
        if is_due:
            tags = (key for key in self._records if key.startswith(keys.TAG_PREFIX))
            yield from origin.tags(tags, compare=is_survey)

    def _hinted_records(self, hint: documents.Head | None) -> dict[str, ObjectInfo]:
        """Return the edge records that a head hint names and the mirror lacks."""
        edges = hint.anchors if hint else ()
        named = (e.record for e in edges if e.record == keys.edge_key(e.version, e.kind, e.base))
        lacking = (key for key in named if key not in self._records)
        return {key: info for key in lacking if (info := self.source.find(key))}

    def _lacks(self, copy: ObjectCopy) -> bool:
        """Return whether the mirror lacks an object, or may lack it."""
        version = copy.version
        if copy.key in self._sent:
            return False
        if version is None or copy.key in self._missing or version > self._listed_head:
            return True
        if copy.is_document:
            return version > self.version or copy.key != keys.manifest_key(version)
        return not self._is_gone(copy)

    def _may_be_there(self, copy: ObjectCopy) -> bool:
        """Return whether the mirror has an object of this size, which nothing may have proven."""
        version = copy.version
        return (
            version is not None and version <= self._listed_head and copy.key not in self._missing
        )

    def _is_gone(self, copy: ObjectCopy) -> bool:
        edge, version = copy.edge, copy.version
        if self._pruned is None or edge is None or version is None:
            return False
        return self._pruned.range_of(edge.kind, edge.base, version) is not None

    def _read_manifest(self, version: Version) -> Committed | None:
        if version > self.version:
            return None
        key = keys.manifest_key(version)
        try:
            data = self.destination.get(key)
        except errors.ObjectNotFoundError:
            self._is_whole = False
            raise
        return Committed(documents.unseal(data, documents.Manifest, key=key), object_digest(data))

    def _check_same(self) -> None:
        """Check that the source has the newest version of the mirror."""
        version, head = self.version, self.head
        if version < 0:
            return
        if head < version:
            raise errors.StoreWentBackError(
                f"the source went back: its mirror {self.destination.url} has version "
                f"{version}, the newest of {self.source.url} is {head}",
                version=version,
            )
        known, key = self._read_manifest(version), keys.manifest_key(version)
        if known and object_digest(self.source.get(key)) != known.digest:
            raise errors.ForkedChainError(
                f"version {version} of {self.source.url} differs from that of its mirror "
                f"{self.destination.url}",
                version=version,
                hint="two histories exist: find out which is right, and mirror to another URL",
            )

    def _run(self, copies: Iterable[ObjectCopy], stop: Event) -> Iterator[MirrorReceipt]:
        objects = nbytes = 0
        start, self._sent = time.perf_counter(), set()
        pipeline = CopyPipeline(self.source, self.destination, self._may_be_there)

        def receipt() -> MirrorReceipt:
            return MirrorReceipt(
                version=self.version,
                head=self.head,
                objects=objects,
                nbytes=nbytes,
                left_out=len(self.left_out),
                seconds=time.perf_counter() - start,
            )

        self.is_copying = True
        try:
            for outcome in pipeline.run(self._lacking(copies), stop):
                copy = outcome.copy
                self._note(outcome)
                objects, nbytes = objects + bool(outcome.nbytes), nbytes + outcome.nbytes
                if copy.version is not None and copy.key == keys.manifest_key(copy.version):
                    self.version = max(self.version, copy.version)
                    yield receipt()
                    objects, nbytes, start = 0, 0, time.perf_counter()
            if objects and self.version >= 0:
                yield receipt()
        finally:
            self.is_copying = False

    def _lacking(self, copies: Iterable[ObjectCopy]) -> Iterator[ObjectCopy]:
        for copy in filter(self._lacks, copies):
            self._sent.add(copy.key)
            if self._is_whole or copy.key not in self._missing:
                self._planned(copy.nbytes)
            yield copy

    def _note(self, outcome: CopyOutcome) -> None:
        """Note what became of a copy; name the first payloads that the source has no more."""
        copy = outcome.copy
        if outcome.is_other and self._opened:
            which = self._missing.get(copy.key, copy.key)
            why = f"{copy.key} of {self.source.url} is another record than that of the mirror"
            self._opened[2].leave_out(which, why)
        if not outcome.is_lost:
            self._missing.pop(copy.key, None)
            if copy.is_document:
                self._records.add(copy.key)
                self._prune = max(self._prune, keys.prune_of(copy.key) or NONE)
            return
        if not self._is_gone(copy) and self._opened:  # by a record that came meanwhile
            self._pruned = newest_prune(self._opened[0])
        if self._is_gone(copy):
            return
        self.left_out.add(copy.key)
        self._is_joinable = False
        if len(self.left_out) <= NAMED:
            more = "; more are counted at the end" if len(self.left_out) == NAMED else ""
            logger.warning("%s is gone from %s, and is left out%s", copy.key, self.source.url, more)

    def _read_hint(self) -> tuple[bytes, documents.Head | None]:
        try:
            data = self.source.get(keys.HEAD_KEY, limit=MAX_HINT)
            return data, documents.parse(data, documents.Head, key=keys.HEAD_KEY)
        except (errors.ObjectNotFoundError, errors.FormatError):
            return b"", None

    def _put_anew(self, key: str, data: bytes) -> None:
        """Put a document that is replaced in place, unless this process has put these bytes."""
        if self._put.get(key) != data:
            self.destination.put(key, data)
            self._put[key] = data

    def _put_signatures(self, origin: SourceDocuments) -> None:
        """Put signatures into the mirror; like a publisher's, they come before ``chain.json``."""
        for key, data in origin.signatures():
            if self._put.get(key) is None and self.destination.find(key) is not None:
                self._put[key] = self.destination.get(key)
            self._put_anew(key, data)

    def _tidy(self, *, is_survey: bool) -> None:
        if not self._is_joinable and self.version >= 0:
            self._check_newcomers()
        if is_survey:
            self._delete_pruned()

    def _check_newcomers(self) -> None:
        chain = Chain.open(self.destination, self._trust)
        try:
            plan_present(chain, None, chain.read(self.version))
        except errors.BrokenChainError as exc:
            first = min(self.left_out, default="")
            gone = f": {len(self.left_out)} payloads are gone from the source, {first} first"
            raise errors.BrokenChainError(
                f"no newcomer can join the mirror {chain.store.url} at version "
                f"{self.version}{gone if first else ''}",
                version=self.version,
                hint="what can be copied was copied; publish an anchor, and the mirror heals",
            ) from exc
        self._is_joinable = True

    def _delete_pruned(self) -> None:
        """Delete pruned payloads that the source deleted; say how many others it has no more."""
        extra, there = self._extra, self.destination
        record, clock = self._pruned, there.clock()
        if record is None or clock is None or not extra or self.version < 0:
            return
        chain = Chain.open(there, self._trust)
        now = min(record.time, clock)  # one clock that is ahead ends no grace
        rows = [row for row in record.pruned if row.after <= now]
        due = {key for key in extra if any(_is_in(row, key) for row in rows)}
        due -= self.source.find_all(due).keys()
        try:
            plan_present(chain, None, chain.read(self.version), gone=due)
        except errors.BrokenChainError as exc:
            logger.warning("nothing pruned is deleted from %s: %s", there.url, exc)
            return
        with Pool(DELETES, "deltachain-delete") as pool:
            for _ in pool.map(there.delete, due):
                pass
        stay = len(extra - due)
        if stay not in (0, self._stay):
            logger.info("%s keeps %d payloads that its source does not have", there.url, stay)
        self._stay = stay


def check_placement(source: Store, destination: Store) -> None:
    """Check that a mirror would not lie inside its source, nor in the folder of another chain."""
    outer, inner = source.url.rstrip("/"), destination.url
    if inner.startswith("file://"):
        folder = Path(url2pathname(urlsplit(inner).path)).resolve()
        around = chain_around(folder.parent)
        found = str(around) if around else ""
    else:
        found = outer if inner.startswith(f"{outer}/") else ""
    if found:
        raise errors.ConfigError(
            f"{inner} is inside {found}, where a chain is stored",
            hint="only its publisher may write there: name a folder or a prefix beside the chain",
        )


def promote(store: Store) -> Version:
    """End a mirror, so that a publisher may go on there; return its newest version.

    Stop copying into it first. What the mirror left out then counts as expired.

    Raises:
        ConfigError: The store is no mirror.
        BrokenChainError: No newcomer could join it.
        ChainMismatchError: It mirrors another chain than it has.
    """
    record = read_mirror(store)
    if record is None:
        raise errors.ConfigError(
            f"{store.url} is no mirror: it has no {keys.MIRROR_KEY}",
            hint="publishers may go on there already, or the URL is another one",
        )
    chain = Chain.open(store)
    if chain.identity.chain != record.chain:
        raise errors.ChainMismatchError(
            f"{store.url} mirrors chain {record.chain}, but has {chain.identity.chain}",
            hint="run `deltachain verify` there: something else has written to it",
        )
    head = chain.head()
    if head is None:
        raise errors.no_version(store.url, "mirror the chain first")
    plan_present(chain, None, head)
    store.delete(keys.MIRROR_KEY)
    return head.version


def _oldest_copied(chain: Chain, start: Version | Literal["head"] | None) -> Version:
    if start is None:
        record = read_mirror(chain.store)
        return record.first if record else 0
    committed = chain.head() if start == "head" else choose(chain, VersionChoice(version=start))
    return plan_present(chain, None, committed).edges[0].version if committed else 0


def _is_in(row: documents.PrunedRange, key: str) -> bool:
    """Return whether a payload is of an edge of a range, or of another skip to that version."""
    version = keys.version_of(key) or 0
    is_of_kind = key.startswith(f"{row.kind}s/")
    return is_of_kind and max(row.first, row.span) <= version <= row.last


def follow(
    mirror: Mirror,
    *,
    stop: Event,
    poll_s: float,
    looked: Callable[[errors.DeltaChainError | None], None] = lambda _: None,
) -> Iterator[MirrorReceipt]:
    """Copy versions as they are committed, until ``stop`` is set.

    A store that is unavailable, and an object that is missing or damaged, are logged once and tried
    again with back-off.

    Args:
        mirror: The mirror.
        stop: Ends the loop.
        poll_s: Seconds between two looks at the source.
        looked: Called after each round with the error to be retried, or ``None``.

    Raises:
        ForkedChainError: Source and mirror have different histories.
        ConfigError: The destination is no mirror, or not any more.
        ChainMismatchError: The destination mirrors another chain.
        UnsupportedFormatError: The chain needs a newer deltachain.
    """

    def round_(failures: int) -> Round[MirrorReceipt]:
        if failures:
            mirror.rounds += LOOK_BACK - 1 - mirror.rounds % LOOK_BACK  # this one looks back
        yield from mirror.catch_up(stop)
        looked(None)
        return False

    return repeat(round_, stop=stop, poll_s=poll_s, looked=looked, doing="mirroring")


class MirrorTotals:
    """Sums over all rounds of this process.

    Attributes:
        looked_at: Time at which the source last answered, in seconds since 1970; ``None`` before.
        trouble: Error of the last round; ``None`` for none.
    """

    def __init__(self) -> None:
        self._versions = self._objects = self._nbytes = self._failures = 0
        self.looked_at: float | None = None
        self.applied_at: float | None = None
        self.trouble: errors.DeltaChainError | None = None
        self._since = time.monotonic()

    def silence_of(self, mirror: Mirror) -> float:
        """Return the seconds since the source last answered a round, or since the start.

        0 while objects are copied; of stores that tell, only while their requests are answered.
        """
        since: float | None = self._since
        if mirror.is_copying:
            both = (mirror.source.unanswered_since, mirror.destination.unanswered_since)
            since = min((one for one in both if one is not None), default=None)
        return 0.0 if since is None else time.monotonic() - since

    def count(self, receipt: MirrorReceipt) -> None:
        self._versions += 1
        self._objects += receipt.objects
        self._nbytes += receipt.nbytes
        self.applied_at = time.time()
        self.looked_at, self._since = self.applied_at, time.monotonic()

    def looked(self, trouble: errors.DeltaChainError | None) -> None:
        self.trouble = trouble
        if trouble is not None:
            self._failures += 1
            return
        self.looked_at, self._since = time.time(), time.monotonic()

    def version_of(self, mirror: Mirror) -> Version | None:
        return mirror.version if mirror.version >= 0 else None

    def head_of(self, mirror: Mirror) -> Version | None:
        return mirror.head if mirror.head >= 0 else self.version_of(mirror)

    def figures(self, mirror: Mirror) -> Iterator[Figure]:
        version, head = self.version_of(mirror), self.head_of(mirror)
        yield info(engine="mirror", chain=mirror.chain)
        yield from figures(
            {
                "version": version,
                "head_version": head,
                "lag_versions": None if head is None or version is None else head - version,
                "left_out_payloads": len(mirror.left_out),
                "last_look_timestamp_seconds": self.looked_at,
                "last_apply_timestamp_seconds": self.applied_at,
                "silence_seconds": self.silence_of(mirror),
                "applies": self._versions,
                "failures": self._failures,
                "copied_objects": self._objects,
                "copied_bytes": self._nbytes,
            }
        )
