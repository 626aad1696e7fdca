"""Maintainer: adds skips and anchors to a chain, and prunes it, round by round."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deltachain.chain.chain import Chain, Committed
from deltachain.chain.head_hint import read_hint
from deltachain.chain.plan import Plan
from deltachain.chain.skips import SPANS
from deltachain.chain.write_access import check_write_access
from deltachain.errors import (
    BrokenChainError,
    ChainError,
    ConfigError,
    DeltaChainError,
    FormatError,
    ObjectNotFoundError,
    TensorMismatchError,
)
from deltachain.format.documents import EdgeSummary, dump
from deltachain.maintain.added_edges import add_anchor, add_skip, is_pruned
from deltachain.maintain.due import anchor_version, skips_due
from deltachain.maintain.healing import heal
from deltachain.maintain.pruner import PrunePlan, Pruner
from deltachain.maintain.survey import Survey

logger = logging.getLogger(__name__)

FAILURES: Final = (BrokenChainError, FormatError, ObjectNotFoundError, ConfigError)
"""Errors of one edge, such as a base checkpoint that is not here; others may still be added."""

HINTED: Final = 2
"""Anchors that the head hint names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Maintained:
    """What one round did.

    Attributes:
        head: The newest version.
        skips: Skips added.
        anchors: Anchors added.
        pruned: What was pruned; ``None`` without pruning.
        failed: What could not be done, a message each; that newcomers cannot join comes first.
        no_way: Why newcomers cannot join; ``None`` if they can.
    """

    head: int
    skips: tuple[EdgeSummary, ...] = ()
    anchors: tuple[EdgeSummary, ...] = ()
    pruned: PrunePlan | None = None
    failed: tuple[str, ...] = ()
    no_way: DeltaChainError | None = None


class Maintainer:
    """Maintains one chain, beside publishers, followers and other maintainers.

    A round that is killed leaves at most payload objects that no document names; a later round
    deletes them.

    Args:
        chain: The chain.
        pruner: Pruner of the chain; ``None`` to delete nothing.
        base: Local folder of the base checkpoint, if the chain starts from one.
        anchor_every: Number of versions between two anchors; by default as their bytes say.
        copy: Folder that follows the chain, for an anchor where payloads were lost.
    """

    def __init__(
        self,
        chain: Chain,
        pruner: Pruner | None,
        *,
        base: Path | None = None,
        anchor_every: int | None = None,
        copy: Path | None = None,
    ) -> None:
        self.chain, self.pruner, self.base = chain, pruner, base
        self.anchor_every, self.copy = anchor_every, copy
        self._lost: tuple[EdgeSummary, ...] = ()
        self.survey = pruner.survey if pruner else Survey(chain)
        self._model_nbytes = sum(spec.nbytes for spec in chain.table.specs())

    def round(self, done: Callable[[EdgeSummary], None] = lambda _: None) -> Maintained | None:
        """Add missing skips and an anchor if one is due; prune.

        Args:
            done: Called with each edge that was added.

        Returns:
            What was done; ``None`` if the chain has no version.

        Raises:
            StoreError: The store failed.
            ConfigError: The store is a mirror, or the chain is signed and there is no signing key.
            ChainError: Another maintainer prunes a store that cannot decide races.
        """
        check_write_access(self.chain)
        head = self.chain.head()
        if head is None:
            return None
        self.chain.prunes.refresh(there=True)
        failed: list[str] = []
        healed, no_way = self._heal(head, done)
        failed += [] if no_way is None else [f"{no_way.args[0]}; {no_way.hint}"]
        self._note_lost(head, failed)
        skips = tuple(self._add_skips(head, done, failed))
        anchors = (*healed, *self._add_anchor(head, done, failed))
        self.hint(head)
        pruned = self._prune(failed)
        return Maintained(
            head=head.version,
            skips=skips,
            anchors=anchors,
            pruned=pruned,
            failed=tuple(failed),
            no_way=no_way,
        )

    def _heal(
        self, head: Committed, done: Callable[[EdgeSummary], None]
    ) -> tuple[tuple[EdgeSummary, ...], DeltaChainError | None]:
        """Add an anchor if newcomers cannot join; return it, or why they still cannot."""
        try:
            summary = heal(self.chain, head, self.copy)
        except (ChainError, TensorMismatchError) as error:
            return (), error
        if summary is None:
            return (), None
        done(summary)
        return (summary,), None

    def _prune(self, failed: list[str]) -> PrunePlan | None:
        try:
            return self.pruner.run() if self.pruner else None
        except BrokenChainError as error:  # nothing is deleted before newcomers have a way again
            failed.append(f"nothing was pruned: {error.args[0]}")
            return None

    def _note_lost(self, head: Committed, failed: list[str]) -> None:
        """Note the edges that have lost their parts; name them unless the last round did."""
        before, self._lost = self._lost, self.survey.lost(self._edges(head))
        if self._lost and self._lost != before:
            first = self._lost[0]
            what = f"the {first.kind} to version {first.version}"
            if self._lost[1:]:
                what = f"{len(self._lost):,} edges, {what} first,"
            failed.append(
                f"parts of {what} are gone, deleted by a lifecycle rule or a user; readers and "
                "skips do without them"
            )

    def _edges(self, head: Committed) -> tuple[EdgeSummary, ...]:
        """Return all edges that planners may use."""
        known = self.survey.edges(head)
        return tuple(edge for edge in known if not self.chain.prunes.is_pruned(edge))

    def _add_skips(
        self, head: Committed, done: Callable[[EdgeSummary], None], failed: list[str]
    ) -> Iterable[EdgeSummary]:
        lost = frozenset(self._lost)
        for span in reversed(SPANS):
            for hop, plan in skips_due(
                [edge for edge in self._edges(head) if edge not in lost],
                span,
                known=self.survey.edges(head),
                head=head.version,
                model_nbytes=self._model_nbytes,
            ):
                if is_pruned(self.chain, hop.base, hop.version):
                    continue
                start, target = self.chain.find(hop.base), self.chain.find(hop.version)
                if start is None or target is None or self.survey.has_record(hop.key):
                    continue
                try:
                    summary = self.make_skip(start, plan, target)
                except FAILURES as error:
                    failed.append(f"skip from {hop.base} to {hop.version}: {error}")
                    continue
                except ChainError:
                    if is_pruned(self.chain, hop.base, hop.version):
                        continue  # by another maintainer, meanwhile
                    raise
                done(summary)
                yield summary

    def _add_anchor(
        self, head: Committed, done: Callable[[EdgeSummary], None], failed: list[str]
    ) -> Iterable[EdgeSummary]:
        version = anchor_version(
            self._edges(head),
            head=head.version,
            model_nbytes=self._model_nbytes,
            manifest_nbytes=len(dump(head.manifest)),
            every=self.anchor_every,
        )
        target = None if version is None else self.chain.find(version)
        if target is None:
            return
        try:
            summary = self.make_anchor(target)
        except FAILURES as error:
            failed.append(f"anchor of {target.version}: {error}")
            return
        except ChainError:
            if is_pruned(self.chain, None, target.version):
                return  # by another maintainer, meanwhile
            raise
        done(summary)
        yield summary

    def make_skip(self, start: Committed, plan: Plan, target: Committed) -> EdgeSummary:
        """Fold a plan into a skip, and record it; see :func:`add_skip`."""
        return add_skip(self.chain, start, plan, target, base=self.base)

    def make_anchor(self, target: Committed) -> EdgeSummary:
        """Rebuild a version from nothing, and record it as an anchor; see :func:`add_anchor`."""
        return add_anchor(self.chain, target, base=self.base)

    def hint(self, head: Committed) -> None:
        """Name recorded anchors in the hint that neither manifests nor the hint name."""
        listed = (*head.manifest.recent, *read_hint(self.chain.store).anchors)
        anchors = [edge for edge in self._edges(head) if edge.base is None and edge.record]
        newest = anchors[-HINTED:]
        if any(edge not in listed for edge in newest):
            self.chain.write_head(head.version, newest)
