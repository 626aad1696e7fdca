"""One model on one chain: the diff of a snapshot becomes a committed version."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import msgspec

from deltachain.chain.plan import REQUEST_NBYTES
from deltachain.codec import ENCODINGS, Change
from deltachain.errors import ChainError, ConfigError
from deltachain.format.documents import Edge, EdgeSummary
from deltachain.format.keys import PayloadKind
from deltachain.publish.config import PublishConfig
from deltachain.publish.model.source import ModelTensors, Weight
from deltachain.publish.ranks.channel import Ranks
from deltachain.publish.ranks.collectives import all_reduce
from deltachain.publish.receipt import PublishReceipt
from deltachain.publish.snapshot import Diff, Snapshot
from deltachain.publish.upload import DENSE_SHARE, EdgeKeys, sparse_change, upload, window_change
from deltachain.publish.writer import Writer
from deltachain.types import StateDigest, Version

INDEX_NBYTES = 8
"""Of the index of an element, where a window is not a whole tensor."""


class EdgeShare(msgspec.Struct, frozen=True):
    """One rank's part of an edge.

    Attributes:
        edge: With its payload objects.
        state: What its weights add to the state digest.
        nnz: Elements changed.
        requests: Requests to the store for it.
    """

    edge: Edge
    state: StateDigest
    nnz: int
    requests: int


class Session:
    """What a publisher works with once it is attached; every rank has one.

    Args:
        source: What of the live weights this rank publishes.
        snapshot: Their bits as last published.
        writer: The position in the chain; only the first rank's moves on.
        config: The publisher's settings.
        ranks: All who publish.

    Attributes:
        head: The newest version that is known to be committed; -1 before the first.
    """

    def __init__(
        self,
        source: ModelTensors,
        snapshot: Snapshot,
        writer: Writer,
        config: PublishConfig,
        ranks: Ranks,
    ) -> None:
        self.source, self.snapshot, self.writer = source, snapshot, writer
        self.config, self.ranks = config, ranks
        self.head = writer.parent.version if writer.parent else -1

    @cached_property
    def anchor_nbytes(self) -> int:
        """About the bytes of an anchor."""
        return int(DENSE_SHARE * sum(spec.nbytes for spec in self.source.specs))

    @property
    def anchor_due(self) -> bool:
        """Whether a newcomer would pay too much without an anchor; the first rank knows."""
        limit = self.config.anchor_factor * (self.anchor_nbytes + 2 * REQUEST_NBYTES)
        return self.writer.parent is not None and self.writer.newcomer_cost > limit

    def settle(self) -> Version:
        """The newest committed version, now that the outcome of every commit is known.

        Raises:
            PublisherFencedError: Another publisher has committed the version after it.
            StoreError: It cannot be told yet.
        """
        self.writer.settle()
        if self.writer.parent is not None:
            self.head = self.writer.parent.version
        return self.head

    def put_anchor(self, slot: EdgeKeys) -> EdgeShare:
        """Put all bits of the snapshot as the parts of an anchor; nothing names them yet.

        Raises:
            ConfigError: They do not have the state of the snapshot.
        """
        requests = self.writer.chain.store.requests
        total = StateDigest()

        def changes() -> Iterator[Change]:
            nonlocal total
            for change in self._windows():
                total += change.digest
                yield change

        edge = self._upload(slot, changes())
        if total != self.snapshot.state:
            raise ConfigError(
                "a frozen weight was changed in place: the anchor would not be the version",
                hint="what changes must be trainable, or a buffer, when the publisher attaches",
            )
        return self._share(edge, self.source.held_numel, requests)

    def put_delta(self, slot: EdgeKeys, diff: Diff) -> EdgeShare:
        """Put a diff as the parts of a delta; nothing names them yet."""
        requests = self.writer.chain.store.requests
        edge = self._upload(slot, self._changes(diff))
        return self._share(edge, sum(c.indices.size for c in diff.values()), requests)

    def commit(
        self,
        kind: PayloadKind,
        put: Callable[[EdgeKeys], EdgeShare],
        *,
        topic: str,
        step: int | None = None,
        diff_s: float = 0.0,
        edge_of: Callable[[Sequence[EdgeShare]], Edge] | None = None,
    ) -> PublishReceipt:
        """Commit what every rank puts as the next version.

        Args:
            kind: Of its edge.
            put: This rank's part.
            topic: Names this commit among the ranks; no other attempt has it.
            step: The trainer's.
            diff_s: Seconds that the diff took.
            edge_of: Makes the edge of all parts, if it is not just all of them.

        Raises:
            StoreError: It is not committed, or nobody can tell.
            PublisherFencedError: Another publisher was first.
            RankError: Another rank could not do its part.
        """
        start, store = time.perf_counter(), self.writer.chain.store
        slot = self._slot(kind, self.head + 1)

        def conclude(shares: list[EdgeShare]) -> PublishReceipt:
            encoded, requests = time.perf_counter(), store.requests
            edge = (edge_of or joined)(shares)
            state = sum((share.state for share in shares), StateDigest())
            nnz = sum(share.nnz for share in shares)
            draft = self.writer.draft(slot.commit_id, state=state, step=step, nnz=nnz)
            committed = self.writer.commit(draft, edge)
            return PublishReceipt(
                version=committed.version,
                epoch=draft.epoch,
                kind=edge.kind,
                step=step,
                state=state,
                nnz=nnz,
                numel=self.source.numel,
                nbytes=edge.nbytes,
                diff_s=diff_s,
                requests=sum(share.requests for share in shares) + store.requests - requests,
                encode_s=encoded - start,
                commit_s=time.perf_counter() - encoded,
                kernel=self.snapshot.kernel,
                restored=self.writer.chain.take_restored(),
                manifest=committed.digest,
            )

        kinds = (EdgeShare, PublishReceipt)
        receipt = all_reduce(self.ranks, topic, lambda: put(slot), conclude, kinds)
        self.head = receipt.version
        return receipt

    def add_anchor(self, *, topic: str) -> EdgeSummary:
        """Add an anchor of the newest version.

        Raises:
            StoreError: It is not there; the chain is as it was.
            RankError: Another rank could not do its part.
        """
        slot = self._slot("anchor", self.head)

        def conclude(shares: list[EdgeShare]) -> EdgeSummary:
            committed = self.writer.parent
            if committed is None:
                raise ChainError("an anchor follows a version, and there is none")
            return self.writer.add_anchor(committed, joined(shares))

        kinds = (EdgeShare, EdgeSummary)
        return all_reduce(self.ranks, topic, lambda: self.put_anchor(slot), conclude, kinds)

    def _slot(self, kind: PayloadKind, version: int) -> EdgeKeys:
        """A place for this rank's parts of an edge: no other attempt, and no other rank, has it."""
        epoch = self.writer.epoch
        return EdgeKeys(kind=kind, version=version, epoch=epoch, commit_id=uuid.uuid4().hex)

    def _windows(self) -> Iterator[Change]:
        """Everything that this rank publishes, as the snapshot has it."""
        for weight in self.source.weights:
            bits = self.snapshot.bits(weight)
            for window in weight.route.windows(self._window_numel(weight)):
                yield window_change(window, bits)

    def _window_numel(self, weight: Weight) -> int:
        """Most elements of a window: a part of it stays within its bound, indices included."""
        slots = weight.route.slots
        if all(weight.route.all_of(slot.spec) is not None for slot in slots):
            return max(slot.numel for slot in slots)  # no window has indices
        return max(1, self.config.part_nbytes // (INDEX_NBYTES + weight.spec.itemsize))

    def _changes(self, diff: Diff) -> Iterator[Change]:
        encoding = ENCODINGS.chosen(self.config.encoding)
        for weight, spec, changes in self.snapshot.routed(diff):
            there = weight.route.all_of(spec)
            bits = None if there is None else self.snapshot.bits(weight)[there]
            yield sparse_change(spec, changes, bits, encoding=encoding)

    def _upload(self, slot: EdgeKeys, changes: Iterator[Change]) -> Edge:
        raw = ENCODINGS.chosen(self.config.encoding).own_arrays
        part_nbytes = self.config.part_nbytes
        return upload(self.writer.chain, slot, changes, raw=raw, part_nbytes=part_nbytes)

    def _share(self, edge: Edge, nnz: int, requests: int) -> EdgeShare:
        requests = self.writer.chain.store.requests - requests
        return EdgeShare(edge=edge, state=self.snapshot.state, nnz=nnz, requests=requests)


def joined(shares: Sequence[EdgeShare]) -> Edge:
    """One edge of every rank's parts."""
    edges = [share.edge for share in shares]
    return Edge(
        kind=edges[0].kind,
        base=edges[0].base,
        encodings=tuple(sorted({name for edge in edges for name in edge.encodings})),
        parts=tuple(part for edge in edges for part in edge.parts),
    )
