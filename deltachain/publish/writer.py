"""Writer of a chain: the publisher's position, after which it commits the next version."""

import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, Literal

from deltachain import errors
from deltachain.chain import identity
from deltachain.chain.anchor_rule import Replay
from deltachain.chain.chain import Chain, Committed, check_signing_key
from deltachain.chain.fetch import fetching, scratch
from deltachain.chain.manifests import read_hint
from deltachain.chain.plan import KnownEdges, edge_id
from deltachain.chain.trust import Trust
from deltachain.format import documents, keys
from deltachain.format.documents import Edge, EdgeSummary, Manifest, Table
from deltachain.publish.model.kept_files import check_files
from deltachain.store import Store
from deltachain.types import StateDigest, Version

if TYPE_CHECKING:
    from deltachain.publish.publisher_record import Tenure

logger = logging.getLogger(__name__)

BLOCK_DIGITS: Final = 4
"""Digits of a block of 10,000 manifests; the hinted version's block and the next are listed."""

LEAPS: Final = 25  # number of probes at doubling distance for manifests beyond those blocks

HINT_EVERY: Final = 8
"""Versions between two writes of the hint: saves a request a version, at the cost of a few more
probes by subscribers without a version."""

UNREADABLE: Final = (
    errors.BrokenChainError,
    errors.ObjectNotFoundError,
    errors.FormatError,
    errors.ConfigError,
)
"""Errors of a version that cannot be rebuilt from its store."""


def newest(chain: Chain) -> Committed | None:
    """Return the newest version, the parent of the next commit; ``None`` in a new chain.

    Manifests are listed, since no search finds those behind a gap, which is refused. Versions that
    lost only their manifests are passed: other publishers continued above them.
    """
    store, hinted = chain.store, read_hint(chain.store).version
    is_there = chain.has(hinted)
    known = _listed(store, hinted if is_there else None)
    if is_there:
        known.add(hinted)
    if not known:
        return None
    with suppress(errors.BrokenChainError):  # a gap, handled below
        known.add(chain.newest(max(known)))
    first = hinted if is_there else min(known)
    passed = _check_gaps(chain, first, sorted(v for v in known if v >= first))
    last = chain.read(max(known))
    check_signing_key(chain, last)
    if first > 0 and not is_there:
        passed.append(f"0 to {first - 1}")
    if passed:
        logger.warning(
            "manifests are gone from %s, of versions %s: something deletes what must stay "
            "(FORMAT.md 1); going on behind version %d",
            store.url,
            ", ".join(passed),
            last.version,
        )
        chain.write_head(last.version, [])  # without it, newcomers search below the gap
    return last


def open_or_make(
    store: Store,
    table: Table,
    assets: Callable[[], Mapping[str, bytes]],
    *,
    trust: Trust,
    base: Path | None = None,
    by_state: bool = True,
) -> Chain:
    """Open the existing chain of this model, or create a new one.

    A lost identity is restored if this model's table is proven to be the chain's: the stored table
    still exists, or (with ``by_state``) the newest version, rebuilt with it, has its state.
    """
    identity.refuse_mirror(store, trust)
    now, files = time.time(), assets()
    found = _identity_of_versions(store, trust)
    if found is None:
        chain_id = uuid.uuid4().hex
        chain = Chain.create(store, table, chain_id=chain_id, time=now, assets=files, trust=trust)
        check_files(chain, files)
        return chain
    document = documents.dump(table)
    if why := _why_another(store, table, document, found, base if by_state else False, trust):
        raise errors.BrokenChainError(
            f"the chain's identity is lost: {store.url} has no {keys.CHAIN_KEY}, and this model "
            f"cannot be shown to be that of chain {found.chain}: {why}",
            hint=identity.WAY_OUT,
        )
    if store.find(keys.TABLE_KEY) is None:
        identity.put_back(store, {keys.TABLE_KEY: document}, keys.TABLE_KEY)
    identity.put(store, document, chain_id=found.chain, time=now, assets=files, trust=trust)
    logger.warning(
        "%s was gone from %s, and was made anew for chain %s: something deletes what must stay "
        "(FORMAT.md 1)",
        keys.CHAIN_KEY,
        store.url,
        found.chain,
    )
    return Chain.open(store, trust)


def _listed(store: Store, hinted: Version | None) -> set[Version]:
    prefixes = {"manifests/"}
    if hinted is not None:
        cut = len(".json") + BLOCK_DIGITS
        prefixes = {keys.manifest_key(v)[:-cut] for v in (hinted, hinted + 10**BLOCK_DIGITS)}
    found = {keys.version_of(info.key) for prefix in prefixes for info in store.list(prefix)}
    known = {version for version in found if version is not None}
    if known:
        leaps = [keys.manifest_key(max(known) + (1 << leap)) for leap in range(LEAPS)]
        known |= {v for v in map(keys.version_of, store.find_all(leaps)) if v is not None}
    return known


def _check_gaps(chain: Chain, first: Version, known: list[Version]) -> list[str]:
    """Return the versions from ``first`` on that have lost only their manifests."""
    expected, passed = first, list[str]()
    for version in known:
        while expected < version and chain.has(expected):  # a listing may be out of date
            expected += 1
        if expected < version:
            lost = f"{expected} to {version - 1}" if version - expected > 1 else str(expected)
            if next(iter(chain.store.list(keys.payload_prefix("delta", expected))), None) is None:
                raise errors.BrokenChainError(
                    f"{chain.store.url}: manifests of versions {lost} are missing, and there is "
                    f"one of version {version}: the store went back while a publisher was at work, "
                    "or lost them",
                    version=expected,
                    hint=f"put them back from a backup; or, to go on behind version {expected - 1},"
                    f" remove {keys.manifest_key(version)} and every later manifest, and start "
                    "again: followers that were ahead then join again from nothing",
                )
            passed.append(lost)
        expected = version + 1
    return passed


def _identity_of_versions(store: Store, trust: Trust) -> Manifest | None:
    """Return the newest manifest of a chain without identity; ``None`` for any other chain."""
    if store.find(keys.CHAIN_KEY) is not None:
        return None
    versions = [keys.version_of(info.key) for info in store.list("manifests/")]
    known = sorted(version for version in versions if version is not None)
    if not known or store.find(keys.CHAIN_KEY) is not None:  # created before any manifest
        return None
    first, last = _read(store, known[0], Trust()), _read(store, known[-1], trust)
    if first.chain != last.chain:
        raise errors.BrokenChainError(
            f"the chain's identity is lost: {store.url} has no {keys.CHAIN_KEY}, and versions of "
            f"two chains: version {known[0]} of {first.chain}, version {known[-1]} of {last.chain}",
            hint=f"put {keys.CHAIN_KEY} back from a backup, and remove the manifests of the other "
            "chain",
        )
    return last


def _read(store: Store, version: Version, trust: Trust) -> Manifest:
    key = keys.manifest_key(version)
    data = store.get(key)
    found = documents.unseal(data, Manifest, key=key)
    trust.check(data, Manifest, chain=found.chain, key=key)
    if found.version != version:
        message = f"{key}: is version {found.version} of chain {found.chain}"
        raise errors.MalformedError(message, key=key)
    return found


def _why_another(
    store: Store,
    table: Table,
    document: bytes,
    newest: Manifest,
    base: Path | Literal[False] | None,
    trust: Trust,
) -> str:
    """Return why a table is not proven to be that of the newest version; empty if it is."""
    numel = sum(spec.numel for spec in table.specs())
    if numel != newest.numel:
        return f"it has {numel} elements, version {newest.version} has {newest.numel}"
    with suppress(errors.ObjectNotFoundError):
        return "" if store.get(keys.TABLE_KEY) == document else f"its table is not {keys.TABLE_KEY}"
    if base is False:
        return f"{keys.TABLE_KEY} is gone too"
    supposed = documents.Identity(
        chain=newest.chain, created=0.0, table=keys.object_digest(document)
    )
    chain = Chain(store, supposed, table, trust=trust)
    try:
        committed = chain.read(newest.version)
        plan = chain.plan(None, committed)
        with fetching(chain, plan, base=base, hold=False, room=scratch()) as fetched:
            state = fetched.state()
    except UNREADABLE as exc:
        return (
            f"{keys.TABLE_KEY} is gone too, and version {newest.version} cannot be rebuilt: {exc}"
        )
    if state != committed.state:
        return f"version {newest.version}, rebuilt with its tensors, has another state"
    return ""


class Writer:
    """Writer of consecutive versions in one epoch; another thread may add anchors meanwhile."""

    def __init__(
        self, chain: Chain, *, numel: int, metadata: Mapping[str, str], parent: Committed | None
    ) -> None:
        self.chain = chain
        self.parent = parent  # the newest committed version
        self.epoch = parent.manifest.epoch if parent else 0
        self.replay: Replay | None  # of a newcomer behind the newest anchor, if a way is there
        self.replay, anchor = _way_from_nothing(chain, parent)
        chain.commits.watch(anchor)
        self._known = KnownEdges().after(parent.manifest) if parent else KnownEdges()
        self._numel = numel
        self._metadata = dict(metadata)
        self.committed = Replay()  # of a newcomer, of all versions that this writer committed
        self.tenure: Tenure | None = None  # can say who fenced it
        self._listing = Lock()  # of the sizes and of what the next manifest lists
        self._added: list[EdgeSummary] = []
        self._offered: tuple[EdgeSummary, ...] = ()
        self.uncertain: Manifest | None = None  # one whose commit may have happened

    def why_stopped(self) -> str:
        """Look at the store; return why the next version cannot be committed, or nothing."""
        head = self.parent
        if head is None or self.uncertain:
            return ""
        url = self.chain.store.url
        try:
            if self.chain.find(head.version) is None:
                return f"{url} lost version {head.version}, which this publisher committed"
            later = self.chain.find(head.version + 1)
        except errors.StoreUnavailableError:
            return ""  # the next version tells
        except errors.DeltaChainError as error:
            return str(error.args[0])
        if later is None or later.manifest.epoch == self.epoch:
            return ""
        return f"another publisher committed version {later.version} of {url}"

    @contextmanager
    def _naming_who_was_first(self) -> Iterator[None]:
        try:
            yield
        except errors.PublisherFencedError as error:
            if self.tenure is not None:
                self.tenure.name(error)
            raise

    def commit(
        self,
        edge: Edge,
        *,
        state: StateDigest,
        step: int | None,
        nnz: int,
        commit_id: str = "",
        ext: Mapping[str, Any] | None = None,
    ) -> Committed:
        """Commit the next version after the upload of all its parts; settle after a failure."""
        parent = self.parent
        version = parent.version + 1 if parent else 0
        with self._listing:
            self._offered = tuple(self._added)
        recent, window_from = self._known.listed(version, self._offered)
        self.uncertain = manifest = Manifest(
            ext=dict(ext or {}),
            chain=self.chain.identity.chain,
            version=version,
            epoch=self.epoch,
            commit_id=commit_id or uuid.uuid4().hex,
            parent=parent.digest if parent else "",
            step=step,
            time=time.time(),
            base_state=parent.manifest.state if parent else "",
            state=str(state),
            nnz=nnz,
            numel=self._numel,
            edge=edge,
            recent=recent,
            window_from=window_from,
            metadata=self._metadata,
        )
        with self._naming_who_was_first():
            committed = self.chain.commit(manifest)
        self._advance(committed)
        return committed

    def settle(self) -> bool:
        """Determine an unknown outcome; return whether it was a commit, and advance then."""
        manifest = self.uncertain
        if manifest is None:
            return False
        try:
            with self._naming_who_was_first():
                found = self.chain.settle(manifest)
        except errors.PublisherFencedError:
            self.uncertain = None
            raise
        self.uncertain = None
        if found is None:
            return False
        self._advance(found)
        return True

    def add_anchor(
        self, committed: Committed, edge: Edge, *, before: Replay | None = None
    ) -> EdgeSummary:
        """Record an anchor of a version; list it in the hint and in the next manifest."""
        summary = self.chain.add_edge(committed, edge, base_state="")
        with self._listing:
            self._added.append(summary)
            later = Replay() if before is None else self.committed - before
            if self.replay is None or later.versions < self.replay.versions:
                self.replay = later
        self.chain.commits.watch(_first_part(edge))
        self.write_head()
        return summary

    def close(self) -> None:
        """Write the hint, unless its version may be missing: alone it would look like a chain."""
        with suppress(errors.DeltaChainError):
            if self.parent and not self.uncertain and self.chain.has(self.parent.version):
                self.write_head()

    def write_head(self) -> None:
        """Write the hint; ignore a failure, which only costs followers a probe."""
        if self.parent is not None:
            with suppress(errors.StoreError):
                self.chain.write_head(self.parent.version, self._added)

    def _advance(self, committed: Committed) -> None:
        self.uncertain = None
        self.parent = committed
        manifest = committed.manifest
        self._known = self._known.after(manifest, self._offered)
        nbytes = len(documents.seal(manifest))
        own = Replay(versions=1, deltas=manifest.edge.nbytes, manifests=nbytes)
        with self._listing:
            self._added = [anchor for anchor in self._added if anchor not in self._offered]
            self.committed += own
            if self.chain.commits.anchor_is_gone:
                logger.warning("newcomers need an anchor that is gone: another one is due")
                self.replay = None
                self.chain.commits.watch("")
            if manifest.edge.base is None:
                self.replay = Replay()
                self.chain.commits.watch(_first_part(manifest.edge))
            elif self.replay is not None:
                self.replay += own
        if committed.version % HINT_EVERY == 0:
            self._take_hinted(committed)
            self.write_head()

    def _take_hinted(self, head: Committed) -> None:
        """List the anchors that others added since, and reckon with them."""
        try:
            found = [edge for edge in _hinted(self.chain, head) if edge not in self._added]
            if not found:
                return
            replay, anchor = _way_from_nothing(self.chain, head)
        except errors.StoreError:
            return
        with self._listing:
            self._added += found
            if replay is None or (self.replay and self.replay.versions <= replay.versions):
                return
            self.replay = replay
        self.chain.commits.watch(anchor)


def _way_from_nothing(chain: Chain, parent: Committed | None) -> tuple[Replay | None, str]:
    """Return what the cheapest plan from nothing replays, and the key of a part of its anchor."""
    if parent is None:
        return Replay(), ""
    try:
        plan = chain.plan(None, parent)
        chain.look_ahead(plan)
        edges = [chain.edge(summary, parent) for summary in plan.edges]
    except (errors.BrokenChainError, errors.ObjectNotFoundError, errors.FormatError):
        return None, ""
    parts = {part.key: part.nbytes for edge in edges for part in edge.parts}
    found = {key: info.nbytes for key, info in chain.store.find_all(parts).items()}
    if found != parts:
        return None, ""
    versions = parent.version - plan.edges[0].version
    replay = Replay(
        versions=versions,
        deltas=plan.nbytes - plan.edges[0].nbytes,
        manifests=versions * len(documents.seal(parent.manifest)),
    )
    return replay, _first_part(edges[0])


def _hinted(chain: Chain, head: Committed) -> list[EdgeSummary]:
    """Return recorded anchors that are listed only in the hint, which the next hint omits."""
    found, listed = [], {edge_id(edge) for edge in head.manifest.recent}
    for summary in read_hint(chain.store).anchors:
        is_new = summary.version <= head.version and edge_id(summary) not in listed
        if is_new and summary.record:
            with suppress(errors.ObjectNotFoundError, errors.FormatError):
                chain.edge(summary, head)
                found.append(summary)
    return found


def _first_part(edge: Edge) -> str:
    """Return the key of the oldest part, the first to expire; empty without parts."""
    return edge.parts[0].key if edge.parts else ""


def in_new_epoch(
    chain: Chain, head: Committed, *, numel: int, metadata: Mapping[str, str]
) -> Writer:
    writer = Writer(chain, numel=numel, metadata=metadata, parent=head)
    writer.epoch = head.manifest.epoch + 1
    writer._added += _hinted(chain, head)
    return writer


def take_over(
    chain: Chain,
    *,
    numel: int,
    metadata: Mapping[str, str],
    accept: Callable[[Committed], None] = lambda _: None,
) -> Writer | None:
    """Take over a chain in a new epoch: commit an empty version to fence earlier publishers.

    ``accept`` raises for a head that must not be continued; without a head, there is no writer.
    """
    while (head := newest(chain)) is not None:
        accept(head)
        writer = in_new_epoch(chain, head, numel=numel, metadata=metadata)
        goal = documents.reverted_to(head.manifest)  # an unchanged state stays marked
        ext = {} if goal is None else documents.revert_mark(goal)
        edge = Edge(kind="delta", base=head.version)
        try:
            writer.commit(edge, state=head.state, step=head.manifest.step, nnz=0, ext=ext)
        except errors.PublisherFencedError:
            if chain.read(head.version + 1).manifest.epoch >= writer.epoch:
                raise
            continue  # the earlier publisher's last version was first: take over after it
        return writer
    return None
