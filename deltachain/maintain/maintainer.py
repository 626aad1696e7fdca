"""Maintainer: adds skips and anchors to a chain, and prunes it, round by round."""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Final

from deltachain import errors
from deltachain.chain.ancestry import ANCHOR_AT, SPANS, Hop
from deltachain.chain.anchor_rule import Replay, anchor_due
from deltachain.chain.chain import Chain, Committed, check_write_access, plan_present
from deltachain.chain.manifests import read_hint
from deltachain.chain.plan import Plan, make_plan
from deltachain.chain.upload import DENSE_SHARE
from deltachain.format.documents import EdgeSummary, dump
from deltachain.maintain import added_edges
from deltachain.maintain.pruner import PrunePlan, Pruner
from deltachain.maintain.survey import Survey
from deltachain.types import Version

PART_NBYTES: Final = 2048
"""Size of the header, directory and digests of a small part, about, which folding saves."""


def skips_due(
    edges: Collection[EdgeSummary],
    span: int,
    *,
    known: Collection[EdgeSummary],
    head: Version,
    model_nbytes: int,
) -> Iterator[tuple[Hop, Plan]]:
    """Yield missing skips of one span and the edges to fold, newest first.

    Edges that together are larger than an anchor are not folded: a way over an anchor costs less.
    """
    there = {(edge.base, edge.version) for edge in known}
    leads: dict[Version, list[EdgeSummary]] = defaultdict(list)
    for edge in edges:
        if edge.base is not None:
            leads[edge.version].append(edge)
    oldest = min(
        (edge.base for line in leads.values() for edge in line if edge.base is not None),
        default=head,
    )
    for version in range(head - head % span, oldest + span - 1, -span):
        hop = Hop(version - span, version)
        has_delta = any(edge.base == version - 1 for edge in leads[version])
        plan = _fold(hop, leads) if has_delta and hop not in there else None
        if plan is not None:
            saved = PART_NBYTES * sum(edge.parts for edge in plan.edges)
            if plan.nbytes - saved <= DENSE_SHARE * model_nbytes:
                yield hop, plan


def _fold(hop: Hop, leads: dict[Version, list[EdgeSummary]]) -> Plan | None:
    versions = range(hop.base + 1, hop.version + 1)
    inside = [
        edge
        for version in versions
        for edge in leads.get(version, ())
        if (edge.base or 0) >= hop.base
    ]
    names = {name for edge in inside for name in edge.encodings}
    try:
        return make_plan(hop.base, hop.version, inside, encodings=names)
    except errors.BrokenChainError:
        return None


def anchor_version(
    edges: Collection[EdgeSummary],
    *,
    head: Version,
    model_nbytes: int,
    manifest_nbytes: int,
    every: Version | None = None,
) -> Version | None:
    anchors = [edge for edge in edges if edge.base is None]
    newest = max(anchors, key=lambda edge: edge.version, default=None)
    aligned = head - head % ANCHOR_AT
    if newest is None or newest.version >= aligned:
        return None
    versions = aligned - newest.version
    later = (
        edge for edge in edges if edge.kind == "delta" and newest.version < edge.version <= aligned
    )
    replay = Replay(
        versions=versions,
        deltas=sum(edge.nbytes for edge in later),
        manifests=versions * manifest_nbytes,
    )
    size = newest.nbytes or int(DENSE_SHARE * model_nbytes)
    return aligned if anchor_due(replay, size, every=every) else None


def why_unreachable(chain: Chain, head: Committed) -> errors.BrokenChainError | None:
    try:
        plan_present(chain, None, head)
    except errors.BrokenChainError as exc:
        return errors.BrokenChainError(
            f"newcomers cannot reach version {head.version}, whose objects a lifecycle rule or a "
            f"user deleted: {exc.args[0]}",
            version=head.version,
        )
    return None


logger = logging.getLogger(__name__)

FAILURES: Final = (
    errors.BrokenChainError,
    errors.FormatError,
    errors.ObjectNotFoundError,
    errors.ConfigError,
)
"""Errors of one edge, such as a base checkpoint that is not here; others may still be added."""

HINTED: Final = 2  # anchors that the head hint names


@dataclass(frozen=True, slots=True, kw_only=True)
class Maintained:
    """What one round did."""

    head: int
    skips: tuple[EdgeSummary, ...] = ()
    anchors: tuple[EdgeSummary, ...] = ()
    pruned: PrunePlan | None = None  # what was pruned; `None` without pruning
    # What could not be done, a message each; that newcomers cannot join comes first.
    failed: tuple[str, ...] = ()
    no_way: errors.DeltaChainError | None = None  # why newcomers cannot join; `None` if they can


class Maintainer:
    """Maintains one chain, beside publishers, followers and other maintainers.

    A round that is killed leaves at most payload objects that no document names; a later round
    deletes them.
    """

    def __init__(
        self,
        chain: Chain,
        pruner: Pruner | None,
        *,
        base: Path | None = None,
        anchor_every: int | None = None,
    ) -> None:
        self.chain, self.pruner, self.base, self.anchor_every = chain, pruner, base, anchor_every
        self._lost: tuple[EdgeSummary, ...] = ()
        self.survey = pruner.survey if pruner else Survey(chain)
        self._model_nbytes = sum(spec.nbytes for spec in chain.table.specs())

    def round(self, done: Callable[[EdgeSummary], None] = lambda _: None) -> Maintained | None:
        """Add missing skips and an anchor if one is due; prune."""
        check_write_access(self.chain)
        head = self.chain.head()
        if head is None:
            return None
        self.chain.prunes.refresh(there=True)
        failed: list[str] = []
        no_way = why_unreachable(self.chain, head)
        failed += [] if no_way is None else [f"{no_way.args[0]}; {no_way.hint}"]
        self._note_lost(head, failed)
        skips = tuple(self._add_skips(head, done, failed))
        anchors = tuple(self._add_anchor(head, done, failed))
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

    def _prune(self, failed: list[str]) -> PrunePlan | None:
        try:
            return self.pruner.run() if self.pruner else None
        except (
            errors.BrokenChainError
        ) as error:  # nothing is deleted before newcomers have a way again
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
                if added_edges.is_pruned(self.chain, hop.base, hop.version):
                    continue
                start, target = self.chain.find(hop.base), self.chain.find(hop.version)
                if start is None or target is None or self.survey.has_record(hop.key):
                    continue
                try:
                    summary = self.make_skip(start, plan, target)
                except FAILURES as error:
                    failed.append(f"skip from {hop.base} to {hop.version}: {error}")
                    continue
                except errors.ChainError:
                    if added_edges.is_pruned(self.chain, hop.base, hop.version):
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
            summary = added_edges.add_anchor(self.chain, target, base=self.base)
        except FAILURES as error:
            failed.append(f"anchor of {target.version}: {error}")
            return
        except errors.ChainError:
            if added_edges.is_pruned(self.chain, None, target.version):
                return  # by another maintainer, meanwhile
            raise
        done(summary)
        yield summary

    def make_skip(self, start: Committed, plan: Plan, target: Committed) -> EdgeSummary:
        return added_edges.add_skip(self.chain, start, plan, target, base=self.base)

    def hint(self, head: Committed) -> None:
        """Name recorded anchors in the hint that neither manifests nor the hint name."""
        listed = (*head.manifest.recent, *read_hint(self.chain.store).anchors)
        anchors = [edge for edge in self._edges(head) if edge.base is None and edge.record]
        newest = anchors[-HINTED:]
        if any(edge not in listed for edge in newest):
            self.chain.write_head(head.version, newest)


EVERY_S: Final = 30.0  # seconds between two rounds


class MaintainerThread:
    """Runs rounds of maintenance until it is closed; a failed round is logged and tried again."""

    def __init__(self, make: Callable[[], Maintainer], *, every_s: float = EVERY_S) -> None:
        self._make, self._every_s = make, every_s
        self._stop = Event()
        self._thread = Thread(target=self._run, name="deltachain-maintain", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        maintainer: Maintainer | None = None
        said = ""
        while not self._stop.wait(self._every_s if maintainer else 0):
            try:
                maintainer = maintainer or self._make()
                done = maintainer.round()
            except Exception as error:  # noqa: BLE001 - such as no memory; the next round is tried
                if (str(error) or repr(error)) != said:
                    said = str(error) or repr(error)
                    logger.warning("maintenance failed, the next round tries again: %s", said)
                self._stop.wait(self._every_s)
                continue
            said = ""
            if done is not None and (done.skips or done.anchors):
                logger.info(
                    "maintained version %d: %d skips, %d anchors added",
                    done.head,
                    len(done.skips),
                    len(done.anchors),
                )
        if maintainer is not None:
            maintainer.chain.store.close()
