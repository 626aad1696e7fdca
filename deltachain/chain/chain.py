"""A chain in a store: an append-only log of manifests, and the edges between versions.

A manifest *is* the commit of its version. It is created with put-if-absent, so exactly one of
racing publishers commits. Manifests are contiguous from 0 and never deleted, so the head is found
by probing, without listing.
"""

import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Final

from deltachain import errors
from deltachain.chain import checks
from deltachain.chain.ancestry import Past, Prunes
from deltachain.chain.commits import Commits
from deltachain.chain.identity import identity_there, make, read_asset, read_model, refuse_mirror
from deltachain.chain.manifests import SEEN, Committed, Manifests, Standing, read_hint
from deltachain.chain.plan import VERSIONS_LISTED, Plan
from deltachain.chain.trust import Trust
from deltachain.codec import ENCODINGS
from deltachain.format import keys
from deltachain.format.documents import (
    Edge,
    EdgeRecord,
    EdgeSummary,
    Head,
    Identity,
    Manifest,
    Table,
    dump,
    summarise,
    unseal,
)
from deltachain.format.keys import object_digest
from deltachain.store import ObjectInfo, Store
from deltachain.threads import Pool
from deltachain.types import StateDigest, Version

__all__ = ["Chain", "Committed", "Standing"]


class Chain:
    """One chain in one store.

    Every call asks the store. Earlier answers only pin the next read's content and show forks.

    Attributes:
        store: Store of the chain.
        identity: Chain id and digest of the table.
        table: Tensors of the model.
        documents: Exact bytes of identity and table, by key.
        trust: Keys that sign and check documents; by default those of a reader's environment.
        latest: The newest version seen by this object; ``None`` before the first look.
        prunes: Its prune records.
        commits: Its commits by this object.

    Examples:
        >>> chain = deltachain.Chain.open(deltachain.open_store(url))
        >>> head = chain.head()
        >>> head.version, head.manifest.nnz, head.manifest.numel
        (1, 3, 6)
        >>> print(chain.plan(0, head))
        0 to 1: delta->1 (... B); ... B, 2 requests
    """

    def __init__(
        self,
        store: Store,
        identity: Identity,
        table: Table,
        seen: ObjectInfo | None = None,
        documents: Mapping[str, bytes] | None = None,
        trust: Trust | None = None,
    ) -> None:
        self.store = store
        self.identity = identity
        self.table = table
        self.documents = documents or {keys.CHAIN_KEY: dump(identity), keys.TABLE_KEY: dump(table)}
        self.trust = trust or Trust.of_reader()
        self.latest: Version | None = None
        self._looked = -math.inf
        self._manifests = Manifests(store, identity.chain, seen, self.trust)
        self.commits = Commits(store, self._manifests, identity, self.documents, self.trust)
        self.prunes = Prunes(store, identity.chain, self.trust)
        self._past = Past(store, self._manifests, self.prunes, identity.chain, self.trust)

    @classmethod
    def create(
        cls,
        store: Store,
        table: Table,
        *,
        chain_id: str,
        time: float,
        assets: Mapping[str, bytes],
        trust: Trust | None = None,
    ) -> "Chain":
        """Create the chain, or open an existing one of the same model.

        Racing callers with equal tables get the same chain.

        Raises:
            ChainMismatchError: The URL holds the chain of another model.
            BrokenChainError: The URL has versions, but their identity is lost.
            SignatureError: No trusted key signed the existing chain.
        """
        trust = trust or Trust.of_reader()
        made = make(store, table, chain_id=chain_id, time=time, assets=assets, trust=trust)
        return cls(store, *made, trust)

    @classmethod
    def open(cls, store: Store, trust: Trust | None = None) -> "Chain":
        """Open the chain in a store.

        Args:
            store: Store of the chain.
            trust: Keys that sign and check documents; those of a reader's environment if ``None``.

        Raises:
            NoChainError: The store has no chain yet.
            FormatError: A document is damaged, or needs a newer deltachain.
            SignatureError: No trusted key signed the chain.
        """
        trust = trust or Trust.of_reader()
        return cls(store, *checks.once_more(partial(read_model, store, trust)), trust)

    def look_back(self, version: Version) -> Standing:
        """Check whether a committed version and the chain's identity are still in the store.

        Args:
            version: A version known to be committed.
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
            newest = head.version if head else None
            return Standing(digest, identity, newest, lags=self.trust.mirror)
        return Standing(digest, identity, version if beyond is None else beyond)

    def went_back(self, version: Version) -> None:
        """Forget looks at versions after ``version``, which were removed and may be replaced."""
        self._manifests.looks.forget_after(version)
        self._looked = -math.inf

    @property
    def is_doubtful(self) -> bool:
        """Whether the last look missed its starting point, so that it must be repeated."""
        looks = self._manifests.looks
        return looks.is_lost or looks.missed is not None

    def assets(self) -> Iterator[tuple[str, bytes]]:
        """Read and verify the assets; yield path and content."""
        for ref in self.identity.assets:
            yield checks.asset_path(ref), read_asset(self.store, ref)

    def read(self, version: Version) -> Committed:
        """Read the manifest of a version; see :meth:`Manifests.read`."""
        return self._manifests.read(version)

    def find(self, version: Version) -> Committed | None:
        """Read the manifest of a version; ``None`` if it is not committed."""
        return self._manifests.find(version)

    def has(self, version: Version) -> bool:
        """Return whether a version is committed."""
        return self._manifests.looks.has(version)

    def newest(self, known: Version) -> Version:
        """Find the newest version from a committed one; see :meth:`Looks.newest`."""
        newest = self.latest = self._manifests.looks.newest(known)
        self._looked = time.monotonic()
        return newest

    def just_seen(self, known: Version, within_s: float) -> Version | None:
        """Return the newest version if a wide look, at most ``within_s`` seconds ago, saw it."""
        is_fresh = time.monotonic() - self._looked < within_s
        is_seen = self._manifests.looks.is_wide and is_fresh
        return self.latest if is_seen and (self.latest or 0) >= known else None

    def later(self, known: Version) -> Committed | None:
        """Find the newest version after a committed one; ``None`` if there is none.

        A store that shows one version a request, asked from the newest, returns the next one.
        """
        can = self.store.capabilities
        if self.latest == known and can.probes == 1 and can.conditional_put:
            found = self.find(known + 1)
            self.latest = found.version if found else known
            return found
        newest = self.newest(known)
        return self.read(newest) if newest > known else None

    def head(self) -> Committed | None:
        """Return the newest committed version; ``None`` before the first commit.

        Takes a few probes from the head hint, more if it is wrong. Versions behind a gap count too.
        """
        hinted, looks = read_hint(self.store).version, self._manifests.looks
        known = next((version for version in (hinted, 0) if self.has(version)), None)
        if known is None:
            known = looks.listed()
        if known is None:
            return None
        newest = self.latest = looks.last(known, hinted)
        return self.read(newest)

    def history(self, first: Version, last: Version, *, reads: int = 1) -> Iterator[Committed]:
        """Yield the manifests of ``first`` to ``last``, each verified as parent of the next.

        Up to ``reads`` manifests are read at a time.

        Raises:
            BrokenChainError: A manifest is missing, or names another parent.
        """
        parent: Committed | None = None
        manifests = self._manifests
        for version, committed in manifests.between(first, last, reads, manifests.find):
            if committed is None:
                raise errors.BrokenChainError(
                    f"manifest of version {version} is missing", version=version
                )
            if parent is not None and committed.manifest.parent != parent.digest:
                raise errors.BrokenChainError(
                    f"version {version} names {committed.manifest.parent} as its parent, "
                    f"version {parent.version} is {parent.digest}",
                    version=version,
                )
            yield committed
            parent = committed

    def manifests(
        self, first: Version, last: Version, *, reads: int
    ) -> Iterator[tuple[Committed, bytes]]:
        """Yield the manifests of ``first`` to ``last`` and their exact bytes; see :meth:`read`.

        Up to ``reads`` manifests are read at a time.

        Raises:
            BrokenChainError: A manifest is missing.
        """
        manifests = self._manifests
        try:
            for _, found in manifests.between(first, last, reads, manifests.document):
                yield found
        except errors.ObjectNotFoundError as exc:
            version = keys.version_of(exc.key)
            raise errors.BrokenChainError(
                f"manifest of version {version} is missing in {self.store.url}",
                version=version,
                hint=f"manifests must never be deleted: restore {exc.key} from a backup",
            ) from exc

    def windows(self, newest: Committed) -> Iterator[Committed]:
        """Yield manifests whose edge lists together cover the history, newest first."""
        return self._past.windows(newest, SEEN // VERSIONS_LISTED)

    def look_ahead(self, plan: Plan) -> None:
        """Prefetch the metadata of a plan's manifests in one request, if the store supports it."""
        if plan.edges:
            self._manifests.looks.ahead(range(plan.edges[0].version, plan.edges[-1].version + 1))

    def commit(self, manifest: Manifest) -> Committed:
        """Commit a version exactly once; see :meth:`Commits.commit`."""
        return self.commits.commit(manifest)

    def settle(self, manifest: Manifest) -> Committed | None:
        """Resolve a commit with an unknown outcome; see :meth:`Commits.settle`."""
        return self.commits.settle(manifest)

    def add_edge(self, committed: Committed, edge: Edge, base_state: str) -> EdgeSummary:
        """Record another edge to a committed version; an existing record of it is kept.

        Raises:
            MalformedError: The existing record leads to another state.
            SignatureError: No trusted key signed the existing record.
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
        key = keys.edge_key(manifest.version, edge.kind, edge.base)
        data = self.trust.seal(record, self.identity.chain)
        try:
            self.store.put_if_absent(key, data)
        except errors.AlreadyExistsError:
            data = self.store.get(key)
            record = unseal(data, EdgeRecord, key=key)
            checks.check_record(record, committed.digest, manifest.state, key)
            self.check_listed(data, key)
        return summarise(
            manifest.version, record.edge, record.state, record=key, digest=object_digest(data)
        )

    def write_head(self, version: Version, anchors: Iterable[EdgeSummary]) -> None:
        """Write the head hint."""
        self.store.put(keys.HEAD_KEY, dump(Head(version=version, anchors=tuple(anchors))))

    def edge(self, summary: EdgeSummary, known: Committed | None = None) -> Edge:
        """Read the edge of a summary from its manifest or its edge record.

        Args:
            summary: Summary of the edge, as in a plan.
            known: A manifest that was read already.

        Raises:
            ObjectNotFoundError: The edge record is gone.
            SignatureError: No trusted key signed the edge record or a manifest that lists it.
            DigestMismatchError: The edge record does not have the listed digest.
            MalformedError: The edge differs from its summary, or leads to another state than the
                manifest.
        """
        if known is None or known.version != summary.version:
            known = self.read(summary.version)
        manifest = known.manifest
        if not summary.record:
            key = keys.manifest_key(manifest.version)
            return checks.check_edge(manifest.edge, manifest.summary(), summary, key)
        key = keys.edge_key(summary.version, summary.kind, summary.base)
        if summary.record != key:
            raise errors.MalformedError(f"{key}: listed under key {summary.record!r}", key=key)
        data = self.store.get(summary.record)
        checks.check_digest(data, summary.digest, summary.record)
        record = unseal(data, EdgeRecord, key=summary.record)
        self.check_listed(data, key)
        checks.check_record(record, known.digest, manifest.state, key)
        version, state = record.version, record.state
        found = summarise(version, record.edge, state, record=key, digest=summary.digest)
        return checks.check_edge(record.edge, found, summary, key)

    def sign_identity(self) -> dict[str, bytes]:
        """Return key and content of the identity's signature; empty without a signing key."""
        return self.trust.sign_identity(self.identity.chain, self.documents[keys.CHAIN_KEY])

    def check_listed(self, record: bytes, key: str) -> None:
        """Raise unless a trusted key signed an edge record, or an accepted manifest lists it.

        Args:
            record: The record in its envelope.
            key: Its key.

        Raises:
            SignatureError: Neither is so, and trusted keys are given.
        """
        if not self._manifests.lists(object_digest(record)):
            self.trust.check(record, EdgeRecord, chain=self.identity.chain, key=key)

    def plan(
        self,
        held: Version | None,
        target: Committed,
        *,
        without: Collection[str] = (),
        avoid: Collection[EdgeSummary] = (),
        pruned: bool = False,
    ) -> Plan:
        """Find the cheapest plan from ``held`` to a committed version.

        Args:
            held: The version held; ``None`` for nothing.
            target: The version to reach.
            without: Encodings that cannot be used, though they are known.
            avoid: Edges known to be unusable.
            pruned: Whether to use pruned edges, whose objects may be gone.

        Raises:
            BrokenChainError: No plan exists.
        """
        known = frozenset(ENCODINGS) - set(without) if without else ENCODINGS
        own = target.manifest.summary()
        usable = own not in avoid and (pruned or not self.prunes.is_pruned(own))
        if own.base == held and usable and all(name in known for name in own.encodings):
            return Plan(held=held, target=own.version, edges=(own,))  # no plan is cheaper
        return self._past.plan(held, target, encodings=known, avoid=avoid, pruned=pruned)

    def find_state(self, state: StateDigest) -> Committed | None:
        """Find the newest version with a state digest, in few manifests; see :class:`Past`."""
        return self._past.find_state(state, self.head())


def check_write_access(chain: Chain) -> None:
    """Raise if readers would not accept what this process adds to a chain."""
    refuse_mirror(chain.store, chain.trust)
    if chain.trust.key is None and (head := chain.head()) is not None:
        check_signing_key(chain, head)


def check_signing_key(chain: Chain, head: Committed) -> None:
    """Raise if a writer without a signing key would add to a signed chain."""
    if head.signatures and chain.trust.key is None:
        raise errors.ConfigError(
            f"{chain.store.url} is a signed chain, and this process has no signing key: readers "
            "with trusted keys would refuse what it writes",
            hint="set DELTACHAIN_SIGNING_KEY; with a new key, set DELTACHAIN_TRUSTED_KEYS to the "
            "public key of the old one as well",
        )


READS: Final = 16  # documents read at a time


def plan_present(  # noqa: PLR0913 - each leaves out something else
    chain: Chain,
    held: Version | None,
    target: Committed,
    *,
    without: Collection[str] = (),
    avoid: Collection[EdgeSummary] = (),
    gone: Collection[str] = (),
    pruned: bool = False,
) -> Plan:
    """Find the cheapest plan whose documents and parts exist, by their sizes; reads no part.

    A base checkpoint lies outside the store and counts as present.
    """
    avoid = list(avoid)
    while True:
        plan = chain.plan(held, target, without=without, avoid=avoid, pruned=pruned)
        lost = _lost(chain, plan, target, gone)
        if not lost:
            return plan
        avoid += lost


def is_reachable(chain: Chain, version: Version) -> bool:
    committed = chain.find(version)
    if committed is None:
        return False
    try:
        plan_present(chain, None, committed)
    except errors.BrokenChainError:
        return False
    return True


def _lost(chain: Chain, plan: Plan, target: Committed, gone: Collection[str]) -> list[EdgeSummary]:
    """Return the edges of a plan that have lost their document or a part."""
    chain.look_ahead(plan)
    read = partial(_edge, chain, target)
    with Pool(READS) as pool:
        edges = list(zip(plan.edges, pool.map(read, plan.edges), strict=True))
    parts = {part.key: part.nbytes for _, edge in edges if edge for part in edge.parts}
    infos = chain.store.find_all(key for key in parts if key not in gone)
    found = {key: info.nbytes for key, info in infos.items()}
    return [
        summary
        for summary, edge in edges
        if edge is None or any(found.get(part.key) != part.nbytes for part in edge.parts)
    ]


def _edge(chain: Chain, target: Committed, summary: EdgeSummary) -> Edge | None:
    try:
        return chain.edge(summary, target)
    except (errors.ObjectNotFoundError, errors.FormatError):
        return None
