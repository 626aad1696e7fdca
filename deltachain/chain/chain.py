"""The chain in a store: an append-only log of manifests, and the edges between its versions.

A manifest *is* the commit of its version. It is created with put-if-absent, so of racing publishers
one commits; manifests are contiguous from 0 and never deleted, so the head is found by probing and
nobody needs to list.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from deltachain.chain.ancestry import Past
from deltachain.chain.checks import check_edge, check_record
from deltachain.chain.commits import Commits
from deltachain.chain.head_hint import read_hint
from deltachain.chain.identity import check_digest, identity_there, lost_chain, make, read_model
from deltachain.chain.log import Committed, Manifests
from deltachain.chain.lookup import SEEN, Standing
from deltachain.chain.plan import Plan
from deltachain.codec import ENCODINGS
from deltachain.errors import (
    AlreadyExistsError,
    BrokenChainError,
    FormatError,
    MalformedError,
)
from deltachain.format import keys
from deltachain.format.digest import object_digest
from deltachain.format.documents import (
    Edge,
    EdgeRecord,
    EdgeSummary,
    Head,
    Identity,
    Manifest,
    Table,
    dump,
    seal,
    summarise,
    unseal,
)
from deltachain.store import ObjectInfo, Store
from deltachain.types import StateDigest, Version

__all__ = ["Chain", "Committed", "Standing"]


class Chain:
    """One chain in one store.

    Every call asks the store: what is kept of its answers only names the content that is read next,
    and tells a fork.

    Attributes:
        store: Where it lies.
        identity: Its id and the digest of its table.
        table: Its tensors.
        documents: The exact bytes of both, by key.
        latest: The newest version that this object has seen.
    """

    def __init__(
        self,
        store: Store,
        identity: Identity,
        table: Table,
        seen: ObjectInfo | None = None,
        documents: Mapping[str, bytes] | None = None,
    ) -> None:
        self.store = store
        self.identity = identity
        self.table = table
        self.documents = documents or {keys.CHAIN_KEY: dump(identity), keys.TABLE_KEY: dump(table)}
        self.latest: Version | None = None
        self._manifests = Manifests(store, identity.chain, seen)
        self._commits = Commits(store, self._manifests, identity, self.documents)
        self._past = Past(store, self._manifests)

    @classmethod
    def create(
        cls, store: Store, table: Table, *, chain_id: str, time: float, assets: Mapping[str, bytes]
    ) -> Chain:
        """Make the chain, or open the one that is there if it is of the same model.

        Of racing callers with equal tables all get the same chain.

        Raises:
            ChainMismatchError: The URL holds the chain of another model.
            BrokenChainError: There are versions here, and their identity is lost.
        """
        return cls(store, *make(store, table, chain_id=chain_id, time=time, assets=assets))

    @classmethod
    def open(cls, store: Store) -> Chain:
        """Open the chain at a store.

        Raises:
            ObjectNotFoundError: There is none yet.
            FormatError: It is not readable by this version, or not what it says.
        """
        try:
            return cls(store, *read_model(store))
        except FormatError:  # a bit may have flipped on the way
            return cls(store, *read_model(store))

    def check_present(self) -> None:
        """Tell a chain that has nothing new from one that is no longer where it was.

        Raises:
            ObjectNotFoundError: Its store answers, and has no chain.
        """
        if self.store.find(keys.CHAIN_KEY) is None:
            raise lost_chain(self.store.url)

    def look_back(self, version: Version) -> Standing:
        """Look whether a committed version and the chain's identity are still in the store.

        Args:
            version: What was committed, as far as the caller knows.
        """
        looks, manifests = self._manifests.looks, self._manifests
        if looks.is_wide:
            found = looks.around(version)
            digest = manifests.content(version) if version in found else None
            beyond = None if version + 1 in found else max(found, default=None)
        else:
            digest = manifests.digest(version)
            start, hinted = version if digest else version - 1, read_hint(self.store).version
            beyond = looks.beyond(start, hinted)
        identity: str | None = self.identity.chain
        if not looks.sees_identity:
            identity = identity_there(self.store)
        elif looks.is_lost:
            identity = None
        looks.missed = None
        if beyond is None and digest is None:
            head = self.head()
            return Standing(digest, identity, head.version if head else None)
        return Standing(digest, identity, version if beyond is None else beyond)

    def went_back(self, version: Version) -> None:
        """Somebody went back to a version: later ones that are seen from now on may be others."""
        self._manifests.looks.forget_after(version)

    @property
    def is_doubtful(self) -> bool:
        """Whether the last look did not find what it began from: another should be taken."""
        looks = self._manifests.looks
        return looks.is_lost or looks.missed is not None

    def assets(self) -> Iterator[tuple[str, bytes]]:
        """The small files of the checkpoint, verified."""
        for ref in self.identity.assets:
            data = bytes(self.store.read(ref.key, nbytes=ref.nbytes, xet_hash=ref.xet_hash))
            check_digest(data, ref.blake3, ref.key)
            yield ref.key.rsplit("/", 1)[-1], data

    def read(self, version: Version) -> Committed:
        """Read the manifest of a version; see :meth:`Manifests.read`."""
        return self._manifests.read(version)

    def find(self, version: Version) -> Committed | None:
        """Read the manifest of a version, if it is committed."""
        return self._manifests.find(version)

    def has(self, version: Version) -> bool:
        """Whether a version is committed."""
        return self._manifests.looks.has(version)

    def newest(self, known: Version) -> Version:
        """The newest committed version, searched from one that is; see :meth:`Looks.newest`."""
        newest = self.latest = self._manifests.looks.newest(known)
        return newest

    def later(self, known: Version) -> Committed | None:
        """A version to follow to from one that is committed; ``None`` when there is none.

        The newest, but where ``known`` was the newest when last seen, and a look shows one version:
        there it is the next, whose manifest is read at once to spare a round trip.
        """
        can = self.store.capabilities
        if self.latest == known and can.probes == 1 and can.conditional_put:
            found = self.find(known + 1)
            self.latest = found.version if found else known
            return found
        newest = self.newest(known)
        return self.read(newest) if newest > known else None

    def head(self) -> Committed | None:
        """The newest committed version; ``None`` before the first commit.

        Takes a handful of probes, beginning where the hint says. A hint that is wrong costs probes,
        never the truth. Versions behind a gap count as well.
        """
        hinted, looks = read_hint(self.store).version, self._manifests.looks
        known = next((version for version in (hinted, 0) if self.has(version)), None)
        if known is None:
            known = looks.listed()
        if known is None:
            return None
        newest = self.latest = looks.last(known, hinted)
        return self.read(newest)

    def history(self, first: Version, last: Version) -> Iterator[Committed]:
        """Manifests of ``first`` to ``last``, each proven to be the parent of the next.

        Raises:
            BrokenChainError: One is missing, or names another parent.
        """
        parent: Committed | None = None
        for version in range(first, last + 1):
            if (version - first) % SEEN == 0:
                self._manifests.looks.ahead(range(version, last + 1))
            committed = self.find(version)
            if committed is None:
                raise BrokenChainError(f"manifest of version {version} is missing", version=version)
            if parent is not None and committed.manifest.parent != parent.digest:
                raise BrokenChainError(
                    f"version {version} names {committed.manifest.parent} as its parent, "
                    f"version {parent.version} is {parent.digest}",
                    version=version,
                )
            yield committed
            parent = committed

    def look_ahead(self, plan: Plan) -> None:
        """Look at the manifests of a plan in one request, where the store can do that."""
        if plan.edges:
            self._manifests.looks.ahead(range(plan.edges[0].version, plan.edges[-1].version + 1))

    def commit(self, manifest: Manifest) -> Committed:
        """Make a version visible, exactly once; see :meth:`Commits.commit`."""
        return self._commits.commit(manifest)

    def settle(self, manifest: Manifest) -> Committed | None:
        """The commit of a manifest whose outcome was unknown; see :meth:`Commits.settle`."""
        return self._commits.settle(manifest)

    def watch(self, anchor: str) -> None:
        """Look every so often, when committing, whether a part of an anchor is there."""
        self._commits.anchor, self._commits.anchor_is_gone = anchor, False

    @property
    def anchor_is_gone(self) -> bool:
        """Whether what is watched was gone at the last commit that looked."""
        return self._commits.anchor_is_gone

    def take_restored(self) -> tuple[str, ...]:
        """Keys that commits found gone and put back, since this was last asked."""
        restored, self._commits.restored = tuple(self._commits.restored), []
        return restored

    def add_edge(self, committed: Committed, edge: Edge, base_state: str) -> EdgeSummary:
        """Record another way to a committed version; the one that is there first stays.

        Raises:
            MalformedError: The one that is there leads to another state.
        """
        manifest = committed.manifest
        record = EdgeRecord(
            chain=self.identity.chain,
            version=manifest.version,
            manifest=committed.digest,
            base_state=base_state,
            state=manifest.state,
            edge=edge,
        )
        key, data = keys.edge_key(manifest.version, edge.kind, edge.base), seal(record)
        try:
            self.store.put_if_absent(key, data)
        except AlreadyExistsError:
            data = self.store.get(key)
            record = unseal(data, EdgeRecord, key=key)
            check_record(record, committed.digest, manifest.state, key)
        return summarise(
            manifest.version, record.edge, record.state, record=key, digest=object_digest(data)
        )

    def write_head(self, version: Version, anchors: Iterable[EdgeSummary]) -> None:
        """Write the hint."""
        self.store.put(keys.HEAD_KEY, dump(Head(version=version, anchors=tuple(anchors))))

    def edge(self, summary: EdgeSummary, known: Committed | None = None) -> Edge:
        """The edge that a summary stands for, from its manifest or its record.

        Args:
            summary: What a plan was made with.
            known: A manifest that was read already, and need not be read again.

        Raises:
            ObjectNotFoundError: The record is gone.
            DigestMismatchError: The record is not the one that was listed.
            MalformedError: It leads to another state than its manifest says, or is not the edge
                that the summary promised.
        """
        if known is None or known.version != summary.version:
            known = self.read(summary.version)
        manifest = known.manifest
        if not summary.record:
            key = keys.manifest_key(manifest.version)
            return check_edge(manifest.edge, manifest.summary(), summary, key)
        key = keys.edge_key(summary.version, summary.kind, summary.base)
        if summary.record != key:
            raise MalformedError(f"{key}: is listed as {summary.record!r}", key=key)
        data = self.store.get(summary.record)
        check_digest(data, summary.digest, summary.record)
        record = unseal(data, EdgeRecord, key=summary.record)
        check_record(record, known.digest, manifest.state, key)
        state, digest = record.state, summary.digest
        found = summarise(record.version, record.edge, state, record=key, digest=digest)
        return check_edge(record.edge, found, summary, key)

    def plan(
        self, held: Version | None, target: Committed, *, avoid: Collection[EdgeSummary] = ()
    ) -> Plan:
        """Plan the cheapest way from ``held`` to a committed version.

        Reads as few manifests as their windows allow.

        Args:
            held: The version held, or ``None``.
            target: Where to.
            avoid: Edges known to be unusable.

        Raises:
            BrokenChainError: No way leads there.
        """
        own = target.manifest.summary()
        if (
            own.base == held
            and own not in avoid
            and all(name in ENCODINGS for name in own.encodings)
        ):
            return Plan(held=held, target=own.version, edges=(own,))  # nothing leads there for less
        return self._past.plan(held, target, encodings=ENCODINGS, avoid=avoid)

    def find_state(self, state: StateDigest) -> Committed | None:
        """The newest version that has a state, as far as few manifests tell; see :class:`Past`."""
        return self._past.find_state(state, self.head())
