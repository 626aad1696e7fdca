"""Session of one model on one chain: commits diffs of a snapshot as versions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Final

import msgspec
import numpy as np

from deltachain.chain.chain import Committed
from deltachain.chain.plan import Replay, anchor_due
from deltachain.chain.upload import DENSE_SHARE, EdgeKeys, EdgeUpload, anchor_part_nbytes
from deltachain.checkpoint import Checkpoint
from deltachain.codec import ENCODINGS
from deltachain.codec.encodings import Encoding
from deltachain.errors import ChainError, ConfigError, DeltaChainError, UnsupportedModelError
from deltachain.format.documents import BaseRef, Edge, EdgeSummary, phases_mark
from deltachain.format.keys import PayloadKind
from deltachain.kernels import host
from deltachain.publish.config import PublishConfig
from deltachain.publish.model.source import ModelTensors, Weight
from deltachain.publish.ranks.collectives import Collective, Ranks
from deltachain.publish.receipt import PublishReceipt
from deltachain.publish.snapshot import Snapshot
from deltachain.publish.wire_form import CheckpointChanges, Diff, sparse_change, window_change
from deltachain.publish.writer import Writer
from deltachain.store import Store
from deltachain.types import Bits, Indices, StateDigest, TensorSpec, Version

CHUNK: Final = 1 << 23
"""Elements copied at a time, the longest that a diff waits for: a few milliseconds."""

PAUSE_S: Final = 1e-4
"""Pause between two chunks, in seconds, so that a waiting diff gets the lock."""


class VersionBits:
    """Bits of a snapshot as they are when this is made, each weight taken once. Thread-safe.

    Later diffs are kept as old bits until the weight that they change is taken, and undone in the
    copy that is returned, not in the snapshot. One thread advances the snapshot, with the lock
    held; another takes the weights.

    Attributes:
        state: Contribution of these bits to the state digest.
        kept_nbytes: Size of the old bits and indices that are kept, in bytes.
        most_nbytes: The largest value of ``kept_nbytes`` so far.
    """

    def __init__(self, snapshot: Snapshot, weights: Iterable[Weight], changing: Lock) -> None:
        self._snapshot, self._changing = snapshot, changing
        self._kept: dict[str, list[tuple[Indices, Bits]]] = {
            weight.spec.name: [] for weight in weights
        }
        self._abandoned = ""
        self.state: StateDigest = snapshot.state
        self.kept_nbytes = self.most_nbytes = 0

    def keep(self, diff: Diff) -> None:
        """Keep the old bits of a diff that advanced the snapshot; call with the lock held."""
        for name, changes in diff.live.items():
            if name in self._kept:
                self._kept[name].append((changes.indices, changes.old))
                self.kept_nbytes += changes.indices.nbytes + changes.old.nbytes
        self.most_nbytes = max(self.most_nbytes, self.kept_nbytes)

    def abandon(self, reason: str) -> None:
        """Keep nothing more, and refuse to take further weights with an error of that reason."""
        with self._changing:
            self._abandoned, self._kept = reason, {}
            self.kept_nbytes = 0

    def take(self, weight: Weight) -> Bits:
        """Return a copy of a weight's flat bits at the version; forget what was kept of it."""
        with self._changing:
            live = self._snapshot.bits(weight)
        bits = np.empty_like(live)
        for at in range(0, live.size, CHUNK):
            with self._changing:  # a failed diff reverts itself under the lock
                bits[at : at + CHUNK] = live[at : at + CHUNK]
            time.sleep(PAUSE_S)
        with self._changing:
            if self._abandoned:
                raise ChainError(self._abandoned)
            # The oldest comes last: whenever an element was copied, it ends as it was then.
            for indices, old in reversed(self._kept.pop(weight.spec.name)):
                host.scatter_(bits, indices, old)
                self.kept_nbytes -= indices.nbytes + old.nbytes
        return bits


@dataclass(frozen=True, slots=True, kw_only=True)
class LateAnchor:
    """An anchor on its way while later versions are committed, on every rank.

    Attributes:
        committed: Manifest of the version; on rank 0.
        before: What a newcomer would fetch of all versions of the writer up to this one.
        bits: Bits of the version on this rank.
    """

    version: Version
    committed: Committed | None
    before: Replay
    bits: VersionBits


class EdgeShare(msgspec.Struct, frozen=True):
    """One rank's part of an edge.

    Attributes:
        edge: Edge with the rank's payload objects.
        state: Contribution of the rank's weights to the state digest.
        upload_s: Time in which at least one object was uploaded, in seconds.
    """

    edge: Edge
    state: StateDigest
    nnz: int
    requests: int
    upload_s: float = 0.0


def revealed(store: Store, shares: Sequence[EdgeShare]) -> Edge:
    """Join the parts of all ranks in one edge, and make them visible."""
    edges = [share.edge for share in shares]
    edge = Edge(
        kind=edges[0].kind,
        base=edges[0].base,
        encodings=tuple(sorted({name for edge in edges for name in edge.encodings})),
        parts=tuple(part for edge in edges for part in edge.parts),
    )
    store.reveal({part.key: part.pin for part in edge.parts})
    return edge


def base_edge(folder: Path, specs: Sequence[TensorSpec], state: StateDigest) -> Edge:
    """Build the edge that refers to a checkpoint, which must have the model's bits."""
    hint = (
        "base must be the checkpoint that the model was loaded from, before training; "
        "without it the first version is uploaded as an anchor"
    )
    checkpoint = Checkpoint(folder)
    for spec in specs:
        found = checkpoint.specs.get(spec.name)
        if found != spec:
            raise ConfigError(f"{folder} has {found}, the model has {spec}", hint=hint)
    if checkpoint.state(spec.name for spec in specs) != state:
        raise ConfigError(f"the model does not hold the bits of {folder}", hint=hint)
    reference = BaseRef(path=str(folder.resolve()), files=tuple(checkpoint.files()))
    return Edge(kind="base", reference=reference)


INDEX_NBYTES = 8
"""Size of an element's index, in bytes, in a window that is not a whole tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt to commit the next version.

    Attributes:
        topic: Unique name of the attempt among the ranks.
        diff: Changes on this rank; ``None`` for an anchor, which has all bits.
        base: Base checkpoint, for a version that refers to it.
        bits: Bits of an anchor's version, if the snapshot advances meanwhile.
        failure: Error of a failed diff on this rank, raised on every rank.
    """

    topic: str
    diff: Diff | None = None
    base: Path | None = None
    bits: VersionBits | None = None
    failure: Exception | None = None
    step: int | None = None
    diff_s: float = 0.0


class Conclusion(msgspec.Struct, frozen=True):
    """A committed version, as rank 0 broadcasts it."""

    receipt: PublishReceipt
    anchor_due: bool


class Session:
    """State of an attached publisher, on every rank.

    The thread that owns the snapshot takes diffs, another commits them, and a third adds anchors.

    Attributes:
        source: Live weights published by this rank.
        snapshot: Last published bits of these weights.
        writer: Position in the chain; advances on rank 0 only.
        ranks: All publishing ranks, for the thread that commits.
        anchor_ranks: The same, for the thread that adds anchors.
        head: The newest version known to be committed; -1 before the first.
        encoding: Encoding of changes.
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
        self.config, self.ranks, self.anchor_ranks = config, ranks, ranks
        self._changing = Lock()  # of the snapshot, and of the list of late anchors
        self._late: list[LateAnchor] = []
        self.encoding = ENCODINGS.get(config.encoding)
        self.head = writer.parent.version if writer.parent else -1

    @cached_property
    def anchor_nbytes(self) -> int:
        """Approximate size of an anchor, in bytes."""
        return int(DENSE_SHARE * sum(spec.nbytes for spec in self.source.specs))

    @property
    def anchor_due(self) -> bool:
        """Whether the chain is due for another anchor; valid on rank 0."""
        factor, every = self.config.anchor_factor, self.config.anchor_every
        due = anchor_due(self.writer.replay, self.anchor_nbytes, factor=factor, every=every)
        leaves_it = self.config.maintain and self.writer.replay is not None
        return due and self.writer.parent is not None and not (self._late or leaves_it)

    @property
    def kept_nbytes(self) -> int:
        """Size of what this rank keeps for anchors on their way, in bytes."""
        return sum(late.bits.kept_nbytes for late in tuple(self._late))

    def diff_(self, topic: str) -> Diff:
        """Take the diff of the snapshot; keep the old bits for anchors on their way.

        ``topic`` is a unique name of the version among the ranks.
        """
        self.source.agree(topic)
        with self._changing:
            diff = self.snapshot.diff_()
            for late in self._late:
                late.bits.keep(diff)
        return diff

    def has_changes(self, topic: str, diff: Diff, failure: Exception | None) -> bool:
        """Return whether any rank has changes or a failure; if that is unknown, revert the diff."""
        try:
            with Collective(self.ranks, f"{topic}/changes") as collective:
                found = collective.gather(bool(diff.nnz or failure), bool)
                return collective.broadcast(any(found), bool)
        except DeltaChainError:
            self.restore(diff)
            raise

    def restore(self, diff: Diff) -> None:
        with self._changing:
            self.snapshot.restore(diff)  # undoing it twice does no harm to a late anchor

    def redo(self, diff: Diff) -> None:
        """Apply a reverted diff again, after its commit proved successful."""
        with self._changing:
            self.snapshot.redo(diff)
            for late in self._late:
                late.bits.keep(diff)

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
        keys = self.keys("anchor" if attempt.diff is None else "delta", self.head + 1)
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
        if attempt.failure is not None:
            raise attempt.failure
        diff, store = attempt.diff, self.writer.chain.store
        requests, encoding = store.requests, self.encoding
        raw = encoding.own_arrays
        part_nbytes = self.config.part_nbytes
        if diff is None:
            part_nbytes = anchor_part_nbytes(self.source.held_nbytes, part_nbytes)
        with EdgeUpload(store, keys, raw=raw, part_nbytes=part_nbytes, visible=False) as upload:
            if diff is not None:
                self._add_changes(upload, diff, encoding)
            elif attempt.base is None:
                self._add_all_bits(upload, attempt.bits)
            edge = upload.finish()
        return EdgeShare(
            edge=edge,
            state=(attempt.bits or self.snapshot).state,
            nnz=self.source.held_numel if diff is None else diff.nnz,
            requests=store.requests - requests,
            upload_s=upload.seconds,
        )

    def conclude(
        self, keys: EdgeKeys, attempt: Attempt, shares: Sequence[EdgeShare], encode_s: float
    ) -> Conclusion:
        start, store = time.perf_counter(), self.writer.chain.store
        requests = sum(share.requests for share in shares) - store.requests
        state = sum((share.state for share in shares), StateDigest())
        edge = revealed(store, shares)
        if attempt.base is not None:
            edge = base_edge(attempt.base, self.source.specs, state)
        nnz = sum(share.nnz for share in shares)
        upload_s = max(share.upload_s for share in shares)
        draft = self.writer.draft(
            keys.commit_id,
            state=state,
            step=attempt.step,
            nnz=nnz,
            ext=phases_mark({"diff": attempt.diff_s, "encode": encode_s, "upload": upload_s}),
        )
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
            upload_s=upload_s,
            kernel=self.snapshot.kernel,
            encoding=self.encoding.name if edge.kind == "delta" else "",
            restored=self.writer.chain.take_restored(),
            kept_nbytes=self.kept_nbytes,
            manifest=committed.digest,
        )
        return Conclusion(receipt, self.anchor_due)

    def begin_anchor(self) -> LateAnchor:
        """Begin an anchor of the newest version, before the next diff."""
        with self._changing:
            late = LateAnchor(
                version=self.head,
                committed=self.writer.parent,
                before=self.writer.committed,
                bits=VersionBits(self.snapshot, self.source.weights, self._changing),
            )
            self._late.append(late)
        return late

    def abandon_anchors(self, reason: str) -> None:
        for late in tuple(self._late):
            late.bits.abandon(f"the anchor of version {late.version} was abandoned: {reason}")

    def add_anchor(self, *, topic: str, late: LateAnchor | None = None) -> EdgeSummary:
        """Add an anchor of the newest version, or of the version of a late anchor.

        Args:
            topic: Unique name of the anchor among the ranks.
            late: What ``begin_anchor`` returned; by default, no diff may be taken meanwhile.
        """
        version = self.head if late is None else late.version
        ranks = self.ranks if late is None else self.anchor_ranks
        attempt = Attempt(topic=topic, bits=None if late is None else late.bits)
        try:
            with Collective(ranks, topic) as collective:
                share = self.put_share(self.keys("anchor", version), attempt)
                shares = collective.gather(share, EdgeShare)
                summary = self._record(shares, late) if ranks.leads else None
                return collective.broadcast(summary, EdgeSummary)
        finally:
            if late is not None:
                with self._changing:
                    self._late.remove(late)

    def _record(self, shares: Sequence[EdgeShare], late: LateAnchor | None) -> EdgeSummary:
        committed = self.writer.parent if late is None else late.committed
        if committed is None:
            raise ChainError("an anchor follows a version, and there is none")
        state = sum((share.state for share in shares), StateDigest())
        if state != committed.state:
            raise ChainError(
                f"the anchor has state {state}, version {committed.version} {committed.state}"
            )
        before = None if late is None else late.before
        return self.writer.add_anchor(
            committed, revealed(self.writer.chain.store, shares), before=before
        )

    def keys(self, kind: PayloadKind, version: Version) -> EdgeKeys:
        epoch = self.writer.epoch
        return EdgeKeys(kind=kind, version=version, epoch=epoch, commit_id=uuid.uuid4().hex)

    def _add_changes(self, upload: EdgeUpload, diff: Diff, encoding: Encoding) -> None:
        for found in diff.by_tensor:
            run = self._run_of(found) if encoding.needs_old else None
            change = sparse_change(
                found.spec,
                found.changes,
                found.digest,
                self._all_of(found),
                encoding=encoding,
                run=run,
            )
            upload.add(change)

    def _run_of(self, found: CheckpointChanges) -> Callable[[], tuple[Bits, int]] | None:
        """Return what reads the elements of a changed tensor on this rank, if they are one run."""
        if (run := found.weight.element_map.run_of(found.spec)) is None:
            return None
        return lambda: (self.snapshot.bits(found.weight)[run[0]], run[1])

    def _all_of(self, found: CheckpointChanges) -> Callable[[], Bits] | None:
        """Return what reads all bits of a changed tensor, unless other ranks have some of them."""
        there = found.weight.element_map.all_of(found.spec)
        return None if there is None else lambda: self.snapshot.bits(found.weight)[there]

    def _add_all_bits(self, upload: EdgeUpload, late: VersionBits | None) -> None:
        bits_of: Callable[[Weight], Bits] = self.snapshot.bits if late is None else late.take
        total, state = StateDigest(), (late or self.snapshot).state
        for weight in self.source.weights:
            bits = bits_of(weight)
            for window in weight.element_map.windows(self._window_numel(weight)):
                known = None if late else self.snapshot.known_digest(weight, window)
                change = window_change(window, bits, known)
                total += change.digest
                upload.add(change)
        if total != state:
            raise UnsupportedModelError(
                "a frozen weight was changed in place: the anchor would not be the version",
                hint="publish an export, which is compared whole: "
                "Publisher(url).attach(lambda: model.state_dict().items()), and publish by hand",
            )

    def _window_numel(self, weight: Weight) -> int:
        """Return the largest window size, in elements, so that its part stays within bounds."""
        slots = weight.element_map.slots
        if all(weight.element_map.all_of(slot.spec) is not None for slot in slots):
            return max(slot.numel for slot in slots)  # windows without indices
        return max(1, self.config.part_nbytes // (INDEX_NBYTES + weight.spec.itemsize))
