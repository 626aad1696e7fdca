"""Growth of a chain of sized payloads by the real writer, maintainer and pruner."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from typing_extensions import override

from deltachain.bench.reach.edge_sizes import edge_nbytes, make_edge
from deltachain.bench.reach.settings import ModelSize, ReachConfig
from deltachain.bench.reach.sized_store import Requests, SizedStore
from deltachain.chain.anchor_cost import anchor_due
from deltachain.chain.chain import Chain, Committed
from deltachain.chain.log import TRUSTING
from deltachain.chain.plan import Plan
from deltachain.chain.skips import SPANS
from deltachain.errors import BrokenChainError
from deltachain.format.documents import Edge, EdgeSummary, Table
from deltachain.format.keys import payload_prefix
from deltachain.maintain.keep import KeepRule
from deltachain.maintain.maintainer import Maintainer
from deltachain.maintain.pruner import GRACE_S, Pruner
from deltachain.publish.writer import Writer
from deltachain.subscribe.follow import LOOK_BACK
from deltachain.types import StateDigest, Version

ROUND: Final = 512
"""Versions between two rounds of maintenance. A round also runs right before each sampled version,
so that readers find what a maintainer adds that keeps up."""

PRUNE: Final = 2048
"""Versions between two rounds that prune too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one reader asks of a store for one purpose.

    Attributes:
        in_row: Requests for documents that wait for one another.
        beside: Requests for documents in threads, or beside the payload.
        documents_nbytes: Size of the documents.
        parts: Sizes of the payload objects, in bytes.
        edges: Number of edges of the plan.
    """

    in_row: int
    beside: int
    documents_nbytes: int
    parts: tuple[int, ...] = ()
    edges: int = 0

    @property
    def requests(self) -> int:
        """Number of all requests."""
        return self.in_row + self.beside + len(self.parts)

    @property
    def nbytes(self) -> int:
        """Size of all that is read, in bytes."""
        return self.documents_nbytes + sum(self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A version of the chain, and what readers ask for right after its commit.

    Attributes:
        version: The version.
        update: A follower that holds the version before.
        join: A newcomer.
        poll: Requests of a follower that holds it, for one poll; fractions are of rarer looks.
        copied: Sizes of all payload objects that lead to it, which a mirror copies.
    """

    version: Version
    update: Reading
    join: Reading
    poll: float
    copied: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """A chain, grown to its last version.

    Attributes:
        moments: Sampled versions.
        writing: Requests of publisher and maintainer, payloads included.
        put_nbytes: Bytes that both put.
        kept_nbytes: Bytes in the store at the end.
        objects: Payload objects that both put.
        anchors: Anchors that both added.
    """

    moments: tuple[Moment, ...]
    writing: Requests
    put_nbytes: int
    kept_nbytes: int
    objects: int
    anchors: int


class SizedMaintainer(Maintainer):
    """The real maintainer, whose skips and anchors have sizes but no content.

    Args:
        chain: The chain, in a :class:`SizedStore`.
        put: Function that puts the parts of an edge.
        model: The model.

    Attributes:
        made: Reads of payloads for skips and anchors, as far as they were added.
    """

    def __init__(self, chain: Chain, put: Callable[[Edge], Edge], model: ModelSize) -> None:
        super().__init__(chain, None)
        self.made = Requests()
        self._put, self._model = put, model

    @override
    def make_skip(self, start: Committed, plan: Plan, target: Committed) -> EdgeSummary:
        edge = make_edge(self._model, target.version, start.version, "skip")
        return self._add(plan, target, edge, start.manifest.state)

    @override
    def make_anchor(self, target: Committed) -> EdgeSummary:
        plan = self.chain.plan(None, target)
        return self._add(plan, target, make_edge(self._model, target.version, None, "anchor"), "")

    def _add(self, plan: Plan, target: Committed, edge: Edge, base_state: str) -> EdgeSummary:
        self.made.reads += sum(folded.parts for folded in plan.edges)
        return self.chain.add_edge(target, self._put(edge), base_state=base_state)


class Growth:
    """A growing chain, and what its readers ask for.

    Args:
        config: Settings of the simulation.
        model: The model.
    """

    def __init__(self, config: ReachConfig, model: ModelSize) -> None:
        self._config, self._model = config, model
        self.store = SizedStore()
        table = Table(tensors=(("weights", "BF16", (model.numel,)),))
        chain = Chain.create(
            self.store, table, chain_id="reach", time=0.0, assets={}, trust=TRUSTING
        )
        self._writer = Writer(chain, numel=model.numel, metadata={}, parent=None)
        self._objects = self._anchors = 0
        watched = Chain.open(self.store, TRUSTING)
        self._maintainer = SizedMaintainer(watched, self._put, model)
        survey = self._maintainer.survey
        self._pruner = Pruner(survey, KeepRule(last=config.keep_last))
        self._of_readers = Requests()

    def run(self, grown: Callable[[Version], None] = lambda _: None) -> Grown:
        """Grow the chain.

        Args:
            grown: Called after each version.
        """
        config = self._config
        sampled = samples(config)
        rounds = {version - version % min(SPANS) for version in sampled}
        moments = []
        for version in range(config.versions):
            self.store.now = version * self._model.step_s
            self._publish(version)
            if version and (version in rounds or version % ROUND == 0):
                self._maintain(prune=version % PRUNE == 0)
            if version in sampled:
                moments.append(self._look(version))
            grown(version)
        writing = self._writing()
        for _ in range(2):  # the second deletes what the first named
            self.store.now += GRACE_S + 1
            self._maintain(prune=True)
        return Grown(
            moments=tuple(moments),
            writing=writing,
            put_nbytes=self.store.put_nbytes,
            kept_nbytes=self.store.nbytes,
            objects=self._objects,
            anchors=self._anchors,
        )

    def _writing(self) -> Requests:
        """Return the requests of publisher and maintainer for all versions."""
        own, made = self.store.spent() - self._of_readers, self._maintainer.made
        return Requests(reads=own.reads + made.reads, writes=own.writes)

    def _maintain(self, *, prune: bool) -> None:
        """Do one round of maintenance, with or without pruning."""
        self._maintainer.pruner = self._pruner if prune else None
        self._maintainer.round()

    def _publish(self, version: Version) -> None:
        """Commit a version as a publisher does, with an anchor if one is due."""
        first = version == 0
        base = None if first else version - 1
        edge = make_edge(self._model, version, base, "anchor" if first else "delta")
        draft = self._writer.draft(state=StateDigest(version + 1, 7), step=version, nnz=1)
        committed = self._writer.commit(draft, self._put(edge))
        if anchor_due(self._writer.replay, edge_nbytes(self._model, 0)):
            whole = make_edge(self._model, version, None, "anchor")
            self._writer.add_anchor(committed, self._put(whole))

    def _put(self, edge: Edge) -> Edge:
        for part in edge.parts:
            self.store.put_sized(part.key, part.nbytes)
        self._objects += len(edge.parts)
        self._anchors += edge.kind == "anchor"
        return edge

    def _look(self, version: Version) -> Moment:
        """Measure what readers ask for, by their own code."""
        before = self.store.spent()
        moment = Moment(
            version=version,
            update=self._update(version),
            join=self._join(),
            poll=self._poll(version),
            copied=self._copied(version),
        )
        spent = self.store.spent() - before
        self._of_readers.reads += spent.reads
        self._of_readers.writes += spent.writes
        return moment

    def _update(self, version: Version) -> Reading:
        chain = Chain.open(self.store, TRUSTING)
        chain.latest = version - 1  # a follower that looked then
        start = self.store.spent()
        later = chain.later(version - 1)
        if later is None:
            raise BrokenChainError(f"version {version} was not found", version=version)
        plan = chain.plan(version - 1, later)
        reading = self._fetch(chain, plan, later, start)
        start = self.store.spent()
        chain.newest(version)  # beside the fetch, see Subscriber
        beside = (self.store.spent() - start).reads
        return Reading(
            in_row=reading.in_row,
            beside=reading.beside + beside,
            documents_nbytes=reading.documents_nbytes,
            parts=reading.parts,
            edges=reading.edges,
        )

    def _join(self) -> Reading:
        start = self.store.spent()
        chain = Chain.open(self.store, TRUSTING)
        head = chain.head()
        if head is None:
            raise BrokenChainError("the chain has no version")
        return self._fetch(chain, chain.plan(None, head), head, start)

    def _fetch(self, chain: Chain, plan: Plan, target: Committed, start: Requests) -> Reading:
        """Read the documents of a plan, as a fetch does."""
        chain.look_ahead(plan)
        edges = [chain.edge(summary, target) for summary in plan.edges]
        spent = self.store.spent() - start
        return Reading(
            in_row=spent.in_row,
            beside=spent.reads - spent.in_row,
            documents_nbytes=spent.nbytes,
            parts=tuple(part.nbytes for edge in edges for part in edge.parts),
            edges=len(edges),
        )

    def _copied(self, version: Version) -> tuple[int, ...]:
        prefixes = [payload_prefix(kind, version) for kind in ("delta", "skip", "anchor")]
        infos = (info for prefix in prefixes for info in self.store.list(prefix))
        return tuple(info.nbytes for info in infos)

    def _poll(self, version: Version) -> float:
        chain = Chain.open(self.store, TRUSTING)
        chain.latest = version
        start = self.store.spent()
        chain.later(version)
        once = (self.store.spent() - start).reads
        chain.look_back(version)
        rarely = (self.store.spent() - start).reads - once
        return once + rarely / LOOK_BACK


def samples(config: ReachConfig) -> frozenset[Version]:
    """Return the versions whose delivery is simulated, drawn at random."""
    count = min(config.steps, config.versions - 1)
    chosen = random.Random(config.seed)  # noqa: S311 - no secret
    return frozenset(chosen.sample(range(1, config.versions), count))
