"""Session of one model on one chain: commits diffs of a snapshot as versions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from deltachain.chain.plan import REQUEST_NBYTES
from deltachain.codec import ENCODINGS
from deltachain.codec.encodings import Encoding
from deltachain.errors import ChainError, ConfigError
from deltachain.format.documents import Edge, EdgeSummary
from deltachain.format.keys import PayloadKind
from deltachain.publish.base import base_edge
from deltachain.publish.config import PublishConfig
from deltachain.publish.diff import Diff
from deltachain.publish.model.source import ModelTensors, Weight
from deltachain.publish.ranks.channel import Ranks
from deltachain.publish.ranks.collectives import Collective
from deltachain.publish.receipt import PublishReceipt
from deltachain.publish.snapshot import Snapshot
from deltachain.publish.upload import (
    DENSE_SHARE,
    EdgeKeys,
    EdgeUpload,
    anchor_part_nbytes,
    sparse_change,
    window_change,
)
from deltachain.publish.writer import Writer
from deltachain.types import StateDigest, Version

INDEX_NBYTES = 8
"""Size of an element's index, in bytes, in a window that is not a whole tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt to commit the next version.

    Attributes:
        topic: Unique name of the attempt among the ranks.
        diff: Changes on this rank; ``None`` for an anchor, which has all bits.
        base: Base checkpoint, for a version that refers to it.
        failure: Error of a failed diff on this rank, raised on every rank.
        step: Step of the trainer.
        diff_s: Time of the diff, in seconds.
    """

    topic: str
    diff: Diff | None = None
    base: Path | None = None
    failure: Exception | None = None
    step: int | None = None
    diff_s: float = 0.0


class EdgeShare(msgspec.Struct, frozen=True):
    """One rank's part of an edge.

    Attributes:
        edge: Edge with the rank's payload objects.
        state: Contribution of the rank's weights to the state digest.
        nnz: Number of changed elements.
        requests: Number of store requests.
    """

    edge: Edge
    state: StateDigest
    nnz: int
    requests: int


class Conclusion(msgspec.Struct, frozen=True):
    """A committed version, as rank 0 broadcasts it.

    Attributes:
        receipt: Receipt of the version.
        anchor_due: Whether an anchor of the version is due.
    """

    receipt: PublishReceipt
    anchor_due: bool


class Session:
    """State of an attached publisher, on every rank.

    Args:
        source: Live weights published by this rank.
        snapshot: Last published bits of these weights.
        writer: Position in the chain; advances on rank 0 only.
        config: Settings of the publisher.
        ranks: All publishing ranks.

    Attributes:
        head: The newest version known to be committed; -1 before the first.
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
        """Approximate size of an anchor, in bytes."""
        return int(DENSE_SHARE * sum(spec.nbytes for spec in self.source.specs))

    @property
    def anchor_due(self) -> bool:
        """Whether joining is too expensive without another anchor; valid on rank 0."""
        limit = self.config.anchor_factor * (self.anchor_nbytes + 2 * REQUEST_NBYTES)
        return self.writer.parent is not None and self.writer.newcomer_cost > limit

    def settle(self) -> Version:
        """Determine the outcome of every commit; return the newest committed version.

        Raises:
            PublisherFencedError: Another publisher has committed the next version.
            StoreError: The outcome is still unknown.
        """
        self.writer.settle()
        if self.writer.parent is not None:
            self.head = self.writer.parent.version
        return self.head

    def commit(self, attempt: Attempt) -> Conclusion:
        """Commit the next version: every rank uploads its share, rank 0 concludes.

        Raises:
            StoreError: The version is not committed, or the outcome is unknown.
            PublisherFencedError: Another publisher was first.
            RankError: Another rank failed, or did not answer in time.
        """
        start = time.perf_counter()
        keys = self._keys("anchor" if attempt.diff is None else "delta", self.head + 1)
        with Collective(self.ranks, attempt.topic) as collective:
            share = self.put_share(keys, attempt)
            shares = collective.gather(share, EdgeShare)
            conclusion = None
            if self.ranks.leads:
                encode_s = time.perf_counter() - start
                conclusion = self.conclude(keys, attempt, shares, encode_s)
            conclusion = collective.broadcast(conclusion, Conclusion)
        self.head = conclusion.receipt.version
        return conclusion

    def put_share(self, keys: EdgeKeys, attempt: Attempt) -> EdgeShare:
        """Upload this rank's parts of an edge, which no document names yet.

        Raises:
            StoreError: A part could not be uploaded.
            ConfigError: The bits of an anchor differ from the state of the snapshot.
        """
        if attempt.failure is not None:
            raise attempt.failure
        diff, config, store = attempt.diff, self.config, self.writer.chain.store
        requests, encoding = store.requests, ENCODINGS.chosen(config.encoding)
        raw = encoding.own_arrays
        part_nbytes = config.part_nbytes
        if diff is None:
            part_nbytes = anchor_part_nbytes(self.source.held_nbytes, part_nbytes)
        with EdgeUpload(store, keys, raw=raw, part_nbytes=part_nbytes) as upload:
            if diff is not None:
                self._add_changes(upload, diff, encoding)
            elif attempt.base is None:
                self._add_all_bits(upload)
            edge = upload.finish()
        return EdgeShare(
            edge=edge,
            state=self.snapshot.state,
            nnz=self.source.held_numel if diff is None else diff.nnz,
            requests=store.requests - requests,
        )

    def conclude(
        self, keys: EdgeKeys, attempt: Attempt, shares: Sequence[EdgeShare], encode_s: float
    ) -> Conclusion:
        """Commit the shares of all ranks as the next version; on rank 0.

        Raises:
            StoreError: The version is not committed, or the outcome is unknown.
            PublisherFencedError: Another publisher was first.
            ConfigError: The model's bits differ from those of the base checkpoint.
        """
        start, store = time.perf_counter(), self.writer.chain.store
        requests = sum(share.requests for share in shares) - store.requests
        state = sum((share.state for share in shares), StateDigest())
        edge = joined(shares)
        if attempt.base is not None:
            edge = base_edge(attempt.base, self.source.specs, state)
        nnz = sum(share.nnz for share in shares)
        draft = self.writer.draft(keys.commit_id, state=state, step=attempt.step, nnz=nnz)
        committed = self.writer.commit(draft, edge)
        receipt = PublishReceipt(
            version=committed.version,
            epoch=draft.epoch,
            kind=edge.kind,
            step=attempt.step,
            state=state,
            nnz=nnz,
            numel=self.source.numel,
            nbytes=edge.nbytes,
            requests=requests + store.requests,
            diff_s=attempt.diff_s,
            encode_s=encode_s,
            commit_s=time.perf_counter() - start,
            kernel=self.snapshot.kernel,
            restored=self.writer.chain.take_restored(),
            manifest=committed.digest,
        )
        return Conclusion(receipt, self.anchor_due)

    def add_anchor(self, *, topic: str) -> EdgeSummary:
        """Add an anchor of the newest version.

        Raises:
            StoreError: The anchor was not added; the chain is unchanged.
            RankError: Another rank failed, or did not answer in time.
        """
        keys = self._keys("anchor", self.head)
        with Collective(self.ranks, topic) as collective:
            shares = collective.gather(self.put_share(keys, Attempt(topic=topic)), EdgeShare)
            summary = None
            if self.ranks.leads:
                committed = self.writer.parent
                if committed is None:
                    raise ChainError("an anchor follows a version, and there is none")
                summary = self.writer.add_anchor(committed, joined(shares))
            return collective.broadcast(summary, EdgeSummary)

    def _keys(self, kind: PayloadKind, version: Version) -> EdgeKeys:
        epoch = self.writer.epoch
        return EdgeKeys(kind=kind, version=version, epoch=epoch, commit_id=uuid.uuid4().hex)

    def _add_changes(self, upload: EdgeUpload, diff: Diff, encoding: Encoding) -> None:
        for found in diff.by_tensor:
            there = found.weight.element_map.all_of(found.spec)
            bits = None if there is None else self.snapshot.bits(found.weight)[there]
            upload.add(sparse_change(found, bits, encoding=encoding))

    def _add_all_bits(self, upload: EdgeUpload) -> None:
        total = StateDigest()
        for weight in self.source.weights:
            bits = self.snapshot.bits(weight)
            for window in weight.element_map.windows(self._window_numel(weight)):
                change = window_change(window, bits)
                total += change.digest
                upload.add(change)
        if total != self.snapshot.state:
            raise ConfigError(
                "a frozen weight was changed in place: the anchor would not be the version",
                hint="weights that change must be trainable or buffers when the publisher attaches",
            )

    def _window_numel(self, weight: Weight) -> int:
        """Return the largest window size, in elements, so that its part stays within bounds."""
        slots = weight.element_map.slots
        if all(weight.element_map.all_of(slot.spec) is not None for slot in slots):
            return max(slot.numel for slot in slots)  # windows without indices
        return max(1, self.config.part_nbytes // (INDEX_NBYTES + weight.spec.itemsize))


def joined(shares: Sequence[EdgeShare]) -> Edge:
    """Join the parts of all ranks in one edge."""
    edges = [share.edge for share in shares]
    return Edge(
        kind=edges[0].kind,
        base=edges[0].base,
        encodings=tuple(sorted({name for edge in edges for name in edge.encodings})),
        parts=tuple(part for edge in edges for part in edge.parts),
    )
