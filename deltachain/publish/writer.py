"""The chain from its publisher's side: the position after which it commits next."""

from __future__ import annotations

import logging
import sys
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from deltachain.chain.chain import Chain, Committed
from deltachain.chain.head_hint import read_hint
from deltachain.chain.plan import cost_of
from deltachain.chain.recent_edges import window, window_from
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
"""Versions between two writes of the hint: a request a version saved, for a few more probes by
subscribers without a version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A version that is about to be committed."""

    commit_id: str
    version: Version
    epoch: int
    step: int | None
    state: StateDigest
    nnz: int


class Writer:
    """Commits versions one after another, in one epoch.

    Attributes:
        chain: The chain.
        parent: The newest committed version; ``None`` before the first.
        epoch: This publisher's.
        newcomer_cost: What the cheapest plan from nothing to ``parent`` costs, in bytes.
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
        self._added: list[EdgeSummary] = []
        self._uncertain: Manifest | None = None

    def draft(
        self, commit_id: str = "", *, state: StateDigest, step: int | None, nnz: int
    ) -> Draft:
        """The next version; its commit id is fresh, as are the keys of its payload."""
        return Draft(
            commit_id=commit_id or uuid.uuid4().hex,
            version=self.parent.version + 1 if self.parent else 0,
            epoch=self.epoch,
            step=step,
            state=state,
            nnz=nnz,
        )

    def commit(self, draft: Draft, edge: Edge) -> Committed:
        """Commit a draft whose parts are all in the store.

        Raises:
            PublisherFencedError: Another publisher was first.
            StoreError: It is not committed, or the outcome is unknown until :meth:`settle`.
        """
        manifest = self._manifest(draft, edge)
        self._uncertain = manifest
        committed = self.chain.commit(manifest)
        self._advance(committed)
        return committed

    @property
    def uncertain(self) -> bool:
        """Whether the last commit may or may not have happened."""
        return self._uncertain is not None

    def settle(self) -> bool:
        """Whether the commit whose outcome was unknown did happen; then the position moves on.

        Raises:
            PublisherFencedError: Another publisher has committed that version.
            StoreWentBackError: The versions before it are gone; ask again.
            StoreError: It still cannot be told; ask again.
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

    def add_anchor(self, committed: Committed, edge: Edge) -> EdgeSummary:
        """Record an anchor of the newest version, and hint at it."""
        summary = self.chain.add_edge(committed, edge, base_state="")
        self._added.append(summary)
        self.newcomer_cost = min(self.newcomer_cost, cost_of(summary))
        self.chain.watch(_first_part(edge))
        self.write_head()
        return summary

    def list_added(self, anchors: Iterable[EdgeSummary]) -> None:
        """List anchors of the newest version from other publishers in the next manifest."""
        self._added += anchors

    def close(self) -> None:
        """Write the hint, unless it is not known whether its version is there.

        In a store that was emptied a hint alone would stand for a chain.
        """
        if not self.uncertain and self._is_there():
            self.write_head()

    def _is_there(self) -> bool:
        try:
            return self.parent is not None and self.chain.has(self.parent.version)
        except DeltaChainError:
            return False

    def write_head(self) -> None:
        """Write the hint; a store that fails here has cost followers a probe, no more."""
        if self.parent is not None:
            try:
                self.chain.write_head(self.parent.version, self._added)
            except StoreError:
                return

    def _manifest(self, draft: Draft, edge: Edge) -> Manifest:
        parent = self.parent
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
            recent=window(parent.manifest if parent else None, self._added),
            window_from=window_from(draft.version),
            metadata=self._metadata,
        )

    def _advance(self, committed: Committed) -> None:
        self._uncertain = None
        self.parent = committed
        self._added.clear()
        summary = committed.manifest.summary()
        cost = cost_of(summary)
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
    """Cost of the cheapest plan from nothing, and the key of a part of the anchor in it.

    Without such a plan it costs more than any anchor.
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
    """Anchors of the newest version that only the hint names: the next one is written without."""
    found = []
    for summary in read_hint(chain.store).anchors:
        if summary.version == head.version and summary.record:
            try:
                chain.edge(summary, head)
            except (ObjectNotFoundError, FormatError):
                continue
            found.append(summary)
    return found


def _first_part(edge: Edge) -> str:
    """Key of the part that was put first, which is the first to expire; empty without parts."""
    return edge.parts[0].key if edge.parts else ""


def take_over(chain: Chain, *, numel: int, metadata: Mapping[str, str]) -> Writer | None:
    """Continue a chain in a new epoch: an empty version that fences every earlier publisher.

    Returns:
        A writer whose parent is that version, or ``None`` when the chain has no version yet.

    Raises:
        PublisherFencedError: Another publisher is taking it over at the same time, and was first.
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
            continue  # the earlier publisher's last version came first: take over behind it
        return writer
    return None
