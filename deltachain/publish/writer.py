"""Writer of a chain: the publisher's position, after which it commits the next version."""

from __future__ import annotations

import logging
import sys
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Final

from deltachain.chain.chain import Chain, Committed
from deltachain.chain.head_hint import read_hint
from deltachain.chain.plan import cost_of
from deltachain.chain.recent_edges import edge_id, listed_edges, window_from
from deltachain.errors import (
    BrokenChainError,
    DeltaChainError,
    FormatError,
    ObjectNotFoundError,
    PublisherFencedError,
    StoreError,
)
from deltachain.format.documents import Edge, EdgeSummary, Manifest
from deltachain.publish.place import newest
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


class Writer:
    """Writer of consecutive versions in one epoch.

    One thread commits versions; another may add anchors of earlier ones meanwhile.

    Attributes:
        chain: The chain.
        parent: The newest committed version; ``None`` before the first.
        epoch: Epoch of this publisher.
        newcomer_cost: Cost of the cheapest plan from nothing to ``parent``, in bytes.
        committed_cost: Cost of all versions committed by this writer, in bytes.
    """

    def __init__(
        self, chain: Chain, *, numel: int, metadata: Mapping[str, str], parent: Committed | None
    ) -> None:
        self.chain = chain
        self.parent = parent
        self.epoch = parent.manifest.epoch if parent else 0
        self.newcomer_cost, anchor = _way_from_nothing(chain, parent)
        chain.watch(anchor)
        self._numel = numel
        self._metadata = dict(metadata)
        self.committed_cost = 0
        self._listing = Lock()  # of the costs and of what the next manifest lists
        self._added: list[EdgeSummary] = []
        self._offered: tuple[EdgeSummary, ...] = ()
        self._uncertain: Manifest | None = None

    def draft(
        self, commit_id: str = "", *, state: StateDigest, step: int | None, nnz: int
    ) -> Draft:
        """Return a draft of the next version, with a new commit id and new payload keys."""
        return Draft(
            commit_id=commit_id or uuid.uuid4().hex,
            version=self.parent.version + 1 if self.parent else 0,
            epoch=self.epoch,
            step=step,
            state=state,
            nnz=nnz,
        )

    def commit(self, draft: Draft, edge: Edge) -> Committed:
        """Commit a draft after the upload of all its parts.

        Raises:
            PublisherFencedError: Another publisher was first.
            StoreError: The draft is not committed, or the outcome is unknown until :meth:`settle`.
        """
        manifest = self._manifest(draft, edge)
        self._uncertain = manifest
        committed = self.chain.commit(manifest)
        self._advance(committed)
        return committed

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
        except PublisherFencedError:
            self._uncertain = None
            raise
        self._uncertain = None
        if found is None:
            return False
        self._advance(found)
        return True

    def add_anchor(
        self, committed: Committed, edge: Edge, *, committed_cost: int | None = None
    ) -> EdgeSummary:
        """Record an anchor of a version; list it in the hint and in the next manifest.

        Args:
            committed: The version.
            edge: The anchor.
            committed_cost: Value of the attribute at that version; by default the version is the
                newest.
        """
        summary = self.chain.add_edge(committed, edge, base_state="")
        with self._listing:
            self._added.append(summary)
            later = 0 if committed_cost is None else self.committed_cost - committed_cost
            self.newcomer_cost = min(self.newcomer_cost, cost_of(summary) + later)
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
        return Manifest(
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
            recent=listed_edges(parent.manifest if parent else None, self._offered),
            window_from=window_from(draft.version),
            metadata=self._metadata,
        )

    def _advance(self, committed: Committed) -> None:
        self._uncertain = None
        self.parent = committed
        summary = committed.manifest.summary()
        cost = cost_of(summary)
        with self._listing:
            self._added = [anchor for anchor in self._added if anchor not in self._offered]
            self.committed_cost += cost
            if self.chain.anchor_is_gone:
                logger.warning("newcomers need an anchor that is gone: another one is due")
                self.newcomer_cost = sys.maxsize
                self.chain.watch("")
            if summary.base is None:
                self.newcomer_cost = cost
                self.chain.watch(_first_part(committed.manifest.edge))
            else:
                self.newcomer_cost += cost
        if committed.version % HINT_EVERY == 0:
            self.write_head()


def _way_from_nothing(chain: Chain, parent: Committed | None) -> tuple[int, str]:
    """Return the cost of the cheapest plan from nothing, and the key of a part of its anchor.

    Without such a plan, the cost exceeds that of any anchor.
    """
    if parent is None:
        return 0, ""
    try:
        plan = chain.plan(None, parent)
        chain.look_ahead(plan)
        edges = [chain.edge(summary, parent) for summary in plan.edges]
    except (BrokenChainError, ObjectNotFoundError, FormatError):
        return sys.maxsize, ""
    parts = {part.key: part.nbytes for edge in edges for part in edge.parts}
    found = {key: info.nbytes for key, info in chain.store.find_all(parts).items()}
    return (plan.cost, _first_part(edges[0])) if found == parts else (sys.maxsize, "")


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


def take_over(chain: Chain, *, numel: int, metadata: Mapping[str, str]) -> Writer | None:
    """Take over a chain in a new epoch: commit an empty version to fence earlier publishers.

    Returns:
        A writer with that version as parent, or ``None`` if the chain has no version yet.

    Raises:
        PublisherFencedError: Another publisher took the chain over at the same time, and was first.
        BrokenChainError: There are versions behind a gap.
    """
    while (head := newest(chain)) is not None:
        writer = Writer(chain, numel=numel, metadata=metadata, parent=head)
        writer.epoch = head.manifest.epoch + 1
        writer.list_added(_hinted(chain, head))
        draft = writer.draft(state=head.state, step=head.manifest.step, nnz=0)
        try:
            writer.commit(draft, Edge(kind="delta", base=head.version))
        except PublisherFencedError:
            if chain.read(draft.version).manifest.epoch >= writer.epoch:
                raise
            continue  # the earlier publisher's last version was first: take over after it
        return writer
    return None
