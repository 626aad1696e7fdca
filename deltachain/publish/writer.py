"""Writer of a chain: the publisher's position, after which it commits the next version."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Final

from deltachain.chain.anchor_cost import Replay
from deltachain.chain.chain import Chain, Committed
from deltachain.chain.head_hint import read_hint
from deltachain.chain.recent_edges import KnownEdges, edge_id
from deltachain.errors import (
    BrokenChainError,
    DeltaChainError,
    FormatError,
    ObjectNotFoundError,
    PublisherFencedError,
    StoreError,
    StoreUnavailableError,
)
from deltachain.format.documents import Edge, EdgeSummary, Manifest, seal
from deltachain.format.revert_mark import revert_mark, reverted_to
from deltachain.publish.place import newest
from deltachain.publish.tenure import Tenure
from deltachain.types import StateDigest, Version

logger = logging.getLogger(__name__)

HINT_EVERY: Final = 8
"""Versions between two writes of the hint: saves a request a version, at the cost of a few more
probes by subscribers without a version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A version before its commit."""

    commit_id: str
    version: Version
    epoch: int
    step: int | None
    state: StateDigest
    nnz: int
    ext: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)


class Writer:
    """Writer of consecutive versions in one epoch.

    One thread commits versions; another may add anchors of earlier ones meanwhile.

    Attributes:
        chain: The chain.
        parent: The newest committed version; ``None`` before the first.
        epoch: Epoch of this publisher.
        replay: What a newcomer fetches behind the newest anchor; ``None`` without a way from
            nothing.
        committed: What a newcomer would fetch of all versions committed by this writer.
        tenure: Record that this publisher is at work, if it keeps one; it can say who fenced it.
    """

    def __init__(
        self, chain: Chain, *, numel: int, metadata: Mapping[str, str], parent: Committed | None
    ) -> None:
        self.chain = chain
        self.parent = parent
        self.epoch = parent.manifest.epoch if parent else 0
        self.replay, anchor = _way_from_nothing(chain, parent)
        chain.watch(anchor)
        self._known = KnownEdges().after(parent.manifest) if parent else KnownEdges()
        self._numel = numel
        self._metadata = dict(metadata)
        self.committed = Replay()
        self.tenure: Tenure | None = None
        self._listing = Lock()  # of the sizes and of what the next manifest lists
        self._added: list[EdgeSummary] = []
        self._offered: tuple[EdgeSummary, ...] = ()
        self._uncertain: Manifest | None = None

    def why_stuck(self) -> str:
        """Look at the store; return why the next version cannot be committed, or nothing.

        A revert, a second publisher and a restored backup are found before the next version.
        """
        head = self.parent
        if head is None or self.uncertain:
            return ""
        url = self.chain.store.url
        try:
            if self.chain.find(head.version) is None:
                return f"{url} lost version {head.version}, which this publisher committed"
            later = self.chain.find(head.version + 1)
        except StoreUnavailableError:
            return ""  # the next version tells
        except DeltaChainError as error:
            return str(error.args[0])
        if later is None or later.manifest.epoch == self.epoch:
            return ""
        return f"another publisher committed version {later.version} of {url}"

    def draft(
        self,
        commit_id: str = "",
        *,
        state: StateDigest,
        step: int | None,
        nnz: int,
        ext: Mapping[str, Any] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Draft:
        """Return a draft of the next version, with a new commit id and new payload keys.

        Its metadata are added to the user's, which count where both have a key.
        """
        return Draft(
            commit_id=commit_id or uuid.uuid4().hex,
            version=self.parent.version + 1 if self.parent else 0,
            epoch=self.epoch,
            step=step,
            state=state,
            nnz=nnz,
            ext=ext or {},
            metadata=metadata or {},
        )

    def commit(self, draft: Draft, edge: Edge) -> Committed:
        """Commit a draft after the upload of all its parts.

        Raises:
            PublisherFencedError: Another publisher was first.
            StoreError: The draft is not committed, or the outcome is unknown until :meth:`settle`.
        """
        manifest = self._manifest(draft, edge)
        self._uncertain = manifest
        try:
            committed = self.chain.commit(manifest)
        except PublisherFencedError as error:
            self._name(error)
            raise
        self._advance(committed)
        return committed

    def _name(self, error: PublisherFencedError) -> None:
        if self.tenure is not None:
            self.tenure.name(error)

    @property
    def uncertain(self) -> bool:
        """Whether the outcome of the last commit is unknown."""
        return self._uncertain is not None

    def settle(self) -> bool:
        """Determine an unknown outcome; if it was a commit, advance the position and return true.

        Raises:
            PublisherFencedError: Another publisher has committed that version.
            StoreWentBackError: The versions before it are missing; call again.
            StoreError: The outcome is still unknown; call again.
        """
        manifest = self._uncertain
        if manifest is None:
            return False
        try:
            found = self.chain.settle(manifest)
        except PublisherFencedError as error:
            self._uncertain = None
            self._name(error)
            raise
        self._uncertain = None
        if found is None:
            return False
        self._advance(found)
        return True

    def add_anchor(
        self, committed: Committed, edge: Edge, *, before: Replay | None = None
    ) -> EdgeSummary:
        """Record an anchor of a version; list it in the hint and in the next manifest.

        Args:
            committed: The version.
            edge: The anchor.
            before: Value of the attribute ``committed`` at that version; by default the version is
                the newest.
        """
        summary = self.chain.add_edge(committed, edge, base_state="")
        with self._listing:
            self._added.append(summary)
            later = Replay() if before is None else self.committed - before
            if self.replay is None or later.versions < self.replay.versions:
                self.replay = later
        self.chain.watch(_first_part(edge))
        self.write_head()
        return summary

    def list_added(self, anchors: Iterable[EdgeSummary]) -> None:
        """List anchors of other publishers in the next manifest."""
        self._added += anchors

    def close(self) -> None:
        """Write the hint, unless its version may be missing.

        In an emptied store, a hint alone would look like a chain.
        """
        if not self.uncertain and self._is_there():
            self.write_head()

    def _is_there(self) -> bool:
        try:
            return self.parent is not None and self.chain.has(self.parent.version)
        except DeltaChainError:
            return False

    def write_head(self) -> None:
        """Write the hint; ignore a failure, which only costs followers a probe."""
        if self.parent is not None:
            try:
                self.chain.write_head(self.parent.version, self._added)
            except StoreError:
                return

    def _manifest(self, draft: Draft, edge: Edge) -> Manifest:
        parent = self.parent
        with self._listing:
            self._offered = tuple(self._added)
        recent, window_from = self._known.listed(draft.version, self._offered)
        return Manifest(
            ext=dict(draft.ext),
            chain=self.chain.identity.chain,
            version=draft.version,
            epoch=draft.epoch,
            commit_id=draft.commit_id,
            parent=parent.digest if parent else "",
            step=draft.step,
            time=time.time(),
            base_state=parent.manifest.state if parent else "",
            state=str(draft.state),
            nnz=draft.nnz,
            numel=self._numel,
            edge=edge,
            recent=recent,
            window_from=window_from,
            metadata={**draft.metadata, **self._metadata},
        )

    def _advance(self, committed: Committed) -> None:
        self._uncertain = None
        self.parent = committed
        manifest = committed.manifest
        self._known = self._known.after(manifest, self._offered)
        own = Replay(versions=1, deltas=manifest.edge.nbytes, manifests=len(seal(manifest)))
        with self._listing:
            self._added = [anchor for anchor in self._added if anchor not in self._offered]
            self.committed += own
            if self.chain.anchor_is_gone:
                logger.warning("newcomers need an anchor that is gone: another one is due")
                self.replay = None
                self.chain.watch("")
            if manifest.edge.base is None:
                self.replay = Replay()
                self.chain.watch(_first_part(manifest.edge))
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
        except StoreError:
            return
        with self._listing:
            self._added += found
            if replay is None or (self.replay and self.replay.versions <= replay.versions):
                return
            self.replay = replay
        self.chain.watch(anchor)


def _way_from_nothing(chain: Chain, parent: Committed | None) -> tuple[Replay | None, str]:
    """Return what the cheapest plan from nothing replays, and the key of a part of its anchor.

    Manifests are taken to be as large as the newest.
    """
    if parent is None:
        return Replay(), ""
    try:
        plan = chain.plan(None, parent)
        chain.look_ahead(plan)
        edges = [chain.edge(summary, parent) for summary in plan.edges]
    except (BrokenChainError, ObjectNotFoundError, FormatError):
        return None, ""
    parts = {part.key: part.nbytes for edge in edges for part in edge.parts}
    found = {key: info.nbytes for key, info in chain.store.find_all(parts).items()}
    if found != parts:
        return None, ""
    versions = parent.version - plan.edges[0].version
    replay = Replay(
        versions=versions,
        deltas=plan.nbytes - plan.edges[0].nbytes,
        manifests=versions * len(seal(parent.manifest)),
    )
    return replay, _first_part(edges[0])


def _hinted(chain: Chain, head: Committed) -> list[EdgeSummary]:
    """Return recorded anchors that are listed only in the hint, which the next hint omits."""
    found, listed = [], {edge_id(edge) for edge in head.manifest.recent}
    for summary in read_hint(chain.store).anchors:
        is_new = summary.version <= head.version and edge_id(summary) not in listed
        if is_new and summary.record:
            try:
                chain.edge(summary, head)
            except (ObjectNotFoundError, FormatError):
                continue
            found.append(summary)
    return found


def _first_part(edge: Edge) -> str:
    """Return the key of the oldest part, the first to expire; empty without parts."""
    return edge.parts[0].key if edge.parts else ""


def in_new_epoch(
    chain: Chain, head: Committed, *, numel: int, metadata: Mapping[str, str]
) -> Writer:
    """Return a writer that fences earlier publishers with its first commit after the head."""
    writer = Writer(chain, numel=numel, metadata=metadata, parent=head)
    writer.epoch = head.manifest.epoch + 1
    writer.list_added(_hinted(chain, head))
    return writer


def take_over(
    chain: Chain,
    *,
    numel: int,
    metadata: Mapping[str, str],
    accept: Callable[[Committed], None] = lambda _: None,
) -> Writer | None:
    """Take over a chain in a new epoch: commit an empty version to fence earlier publishers.

    Args:
        chain: The chain.
        numel: Number of all elements.
        metadata: User metadata, for every manifest.
        accept: Function that raises for a head that must not be continued.

    Returns:
        A writer with that version as parent, or ``None`` if the chain has no version yet.

    Raises:
        PublisherFencedError: Another publisher took the chain over at the same time, and was first.
        BrokenChainError: There are versions behind a gap.
    """
    while (head := newest(chain)) is not None:
        accept(head)
        writer = in_new_epoch(chain, head, numel=numel, metadata=metadata)
        goal = reverted_to(head.manifest)  # an unchanged state stays marked
        ext = {} if goal is None else revert_mark(goal)
        draft = writer.draft(state=head.state, step=head.manifest.step, nnz=0, ext=ext)
        try:
            writer.commit(draft, Edge(kind="delta", base=head.version))
        except PublisherFencedError:
            if chain.read(draft.version).manifest.epoch >= writer.epoch:
                raise
            continue  # the earlier publisher's last version was first: take over after it
        return writer
    return None
