"""Session of one model on one chain: begins or continues it, and commits diffs as versions."""

import logging
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Final

import msgspec
import numpy as np

from deltachain import errors
from deltachain.chain.anchor_rule import Replay, anchor_due
from deltachain.chain.chain import Chain, Committed
from deltachain.chain.fetch import Fetched, fetching, scratch
from deltachain.chain.trust import Trust
from deltachain.chain.upload import DENSE_SHARE, EdgeKeys, EdgeUpload, anchor_part_nbytes
from deltachain.checkpoint import ADAPTER_FILE, Checkpoint, weights_file
from deltachain.codec import ENCODINGS
from deltachain.format.documents import BaseRef, Edge, EdgeSummary, phases_mark
from deltachain.format.keys import CHAIN_KEY, PayloadKind
from deltachain.kernels import host
from deltachain.kernels.arrays import Changes
from deltachain.publish.config import PublishConfig
from deltachain.publish.model.assets import refuse_other_folder
from deltachain.publish.model.kept_files import CONFIG_FILE, with_dtype_of
from deltachain.publish.model.layout import AdjacentRuns, Selection
from deltachain.publish.model.refusals import COMPARED_WHOLE, refuse_specs
from deltachain.publish.model.source import HeldShard, ModelTensors, Weight
from deltachain.publish.open_anchors import METADATA, name_checkpoint, refuse_parts
from deltachain.publish.publisher_record import Tenure
from deltachain.publish.quantise.layers import Files, Layers
from deltachain.publish.quantise.settings import Quantization
from deltachain.publish.quantise.tensors import quantised
from deltachain.publish.ranks.collectives import Collective, Ranks
from deltachain.publish.ranks.sharing import check_copies, divide
from deltachain.publish.revert import check_reverted
from deltachain.publish.side_threads import PHASES
from deltachain.publish.snapshot import FILE_NUMEL, SMALL_NUMEL, Snapshot
from deltachain.publish.wire_form import (
    CheckpointChanges,
    Diff,
    Mapped,
    map_changes,
    sparse_change,
    window_change,
)
from deltachain.publish.writer import UNREADABLE, Writer, open_or_make, take_over
from deltachain.store import Store
from deltachain.threads import Pool, cores
from deltachain.types import Bits, Indices, StateDigest, TensorSpec, Version

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReceipt:
    """Publisher's receipt of one committed version.

    Attributes:
        version: Number of the version.
        manifest: blake3 of the manifest, which differs from that of the same number in a fork.
        epoch: Epoch of the publisher.
        kind: Kind of the version's own edge: ``delta``, ``anchor`` or ``base``.
        step: Step of the trainer, as given.
        state: State digest of the version.
        nnz: Number of changed elements.
        numel: Number of all elements.
        nbytes: Size of the version's own objects, in bytes.
        requests: Number of store requests for the version, and meanwhile for an anchor on its way.
        diff_s: Time of the diff, which blocks the training loop, in seconds.
        encode_s: Time of encoding and uploading the parts in the background, in seconds.
        commit_s: Time of the commit, in seconds.
        upload_s: Part of ``encode_s`` in which at least one object was on its way to the store, in
            seconds; of the slowest rank.
        kernel: Name of the kernels of the diff.
        restored: Keys of the chain's documents that were missing in the store and were restored.
        encoding: Name of the encoding of changes; empty without a delta.
        kept_nbytes: Size of the old bits that rank 0 keeps for an anchor on its way, in bytes.

    Examples:
        >>> with deltachain.Publisher(new_url).attach(model) as publisher:
        ...     train_step(model, optimizer)
        ...     receipt = publisher.publish(step=1).result()
        >>> receipt.step, receipt.nnz, receipt.numel
        (1, 3, 6)
    """

    version: Version
    epoch: int
    kind: str
    step: int | None
    state: StateDigest
    nnz: int
    numel: int
    nbytes: int
    requests: int
    diff_s: float
    encode_s: float
    commit_s: float
    kernel: str
    restored: tuple[str, ...] = ()
    manifest: str = ""
    kept_nbytes: int = 0
    encoding: str = ""
    upload_s: float = 0.0

    @property
    def density(self) -> float:
        """Changed fraction of all elements."""
        return self.nnz / self.numel if self.numel else 0.0

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase of the version, by name; ``upload`` overlaps with ``encode``."""
        return {name: getattr(self, f"{name}_s") for name in PHASES}

    def metrics(self) -> dict[str, float]:
        """Return metrics for a trainer's log, with prefixed names."""
        names = ("version", "requests", "diff_s", "encode_s", "commit_s", "upload_s")
        values = {name: getattr(self, name) for name in names}
        values |= {"changed_frac": self.density, "bytes": self.nbytes}
        return {f"deltachain/{name}": float(value) for name, value in values.items()}

    def __str__(self) -> str:
        seconds = self.diff_s + self.encode_s + self.commit_s
        return (
            f"version {self.version} {self.kind} nnz {self.nnz:,} density {self.density:.3%} "
            f"{self.nbytes:,} B in {seconds:.3f} s"
        )


CHUNK: Final = 1 << 23
"""Elements copied at a time, the longest that a diff waits for: a few milliseconds."""

PAUSE_S: Final = 1e-4  # pause between two chunks, in seconds, so that a waiting diff gets the lock


class VersionBits:
    """Bits of a snapshot as they are when this is made, each weight taken once. Thread-safe.

    Later diffs are kept until the weight that they change is taken, and undone in that copy.
    """

    def __init__(self, snapshot: Snapshot, weights: Iterable[Weight], changing: Lock) -> None:
        self._snapshot, self._changing = snapshot, changing
        self._kept = {weight.spec.name: list[tuple[Indices, Bits]]() for weight in weights}
        self._abandoned = ""
        self.state: StateDigest = snapshot.state
        self.kept_nbytes = self.most_nbytes = 0

    def keep(self, live: Mapping[str, Changes]) -> None:
        """Keep the old bits of changes that advanced the snapshot; call with the lock held."""
        for name, changes in live.items():
            if name in self._kept:
                self._kept[name].append((changes.indices, changes.old))
                self.kept_nbytes += changes.indices.nbytes + changes.old.nbytes
        self.most_nbytes = max(self.most_nbytes, self.kept_nbytes)

    def abandon(self, reason: str) -> None:
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
                raise errors.ChainError(self._abandoned)
            self._snapshot.settle()  # a diff on a device has advanced, and was not kept yet
            # The oldest comes last: whenever an element was copied, it ends as it was then.
            for indices, old in reversed(self._kept.pop(weight.spec.name)):
                host.scatter_(bits, indices, old)
                self.kept_nbytes -= indices.nbytes + old.nbytes
        return bits


@dataclass(frozen=True, slots=True, kw_only=True)
class LateAnchor:
    version: Version
    committed: Committed | None
    before: Replay
    bits: VersionBits


class EdgeShare(msgspec.Struct, frozen=True):
    edge: Edge
    state: StateDigest
    nnz: int
    requests: int
    upload_s: float = 0.0
    copies: dict[str, HeldShard] = {}


def _base_edge(folder: Path, specs: Sequence[TensorSpec], state: StateDigest) -> Edge:
    hint = (
        "base must be the checkpoint that the model was loaded from, before training; "
        "without it the first version is uploaded as an anchor"
    )
    checkpoint = Checkpoint(folder)
    for spec in specs:
        found = checkpoint.specs.get(spec.name)
        if found != spec:
            raise errors.ConfigError(f"{folder} has {found}, the model has {spec}", hint=hint)
    if checkpoint.state(spec.name for spec in specs) != state:
        raise errors.ConfigError(f"the model does not hold the bits of {folder}", hint=hint)
    reference = BaseRef(path=str(folder.resolve()), files=tuple(checkpoint.files()))
    return Edge(kind="base", reference=reference)


INDEX_NBYTES = 8  # size of an element's index, in bytes, in a window that is not a whole tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    topic: str  # a unique name of the attempt among the ranks
    diff: Diff | None = None  # changes on this rank; None for an anchor, which has all bits
    base: Path | None = None  # for a version that refers to a base checkpoint
    bits: VersionBits | None = None  # of an anchor's version, while the snapshot advances
    failure: Exception | None = None  # of the diff on this rank, raised on every rank
    step: int | None = None
    diff_s: float = 0.0


class Conclusion(msgspec.Struct, frozen=True):
    receipt: PublishReceipt
    anchor_due: bool


class Session:
    """State of an attached publisher, on every rank.

    One thread takes diffs, another commits them, and a third adds anchors.
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
        snapshot.on_change = self._keep
        self.config = config
        self.ranks = self.anchor_ranks = ranks  # for the threads that commit and that add anchors
        self._changing = Lock()  # of the snapshot, and of the list of late anchors
        self._late: list[LateAnchor] = []
        self._copies: dict[str, HeldShard] = {}  # as they were at the newest diff
        self.encoding = ENCODINGS.get(config.encoding)
        self.raw_anchors = self.encoding.own_arrays or config.anchor_format == "safetensors"
        share = 1.0 if self.raw_anchors else DENSE_SHARE
        self.anchor_nbytes = int(share * sum(spec.nbytes for spec in source.specs))  # about
        self.head = writer.parent.version if writer.parent else -1

    @property
    def anchor_due(self) -> bool:
        """Whether the chain is due for another anchor; valid on rank 0."""
        factor, every = self.config.anchor_factor, self.config.anchor_every
        due = anchor_due(self.writer.replay, self.anchor_nbytes, factor=factor, every=every)
        leaves_it = self.config.maintain and self.writer.replay is not None
        return due and self.writer.parent is not None and not (self._late or leaves_it)

    @property
    def kept_nbytes(self) -> int:
        return sum(late.bits.kept_nbytes for late in tuple(self._late))

    def diff_(self, topic: str) -> Diff:
        """Take the diff of the snapshot; its changes are found by the thread that commits it."""
        self.source.agree(topic)
        self._copies = self.source.copies(topic)
        with self._changing:
            return self.snapshot.diff_()

    def _keep(self, live: Mapping[str, Changes]) -> None:
        for late in self._late:
            late.bits.keep(live)

    def has_changes(self, topic: str, diff: Diff, failure: Exception | None) -> bool:
        """Return whether any rank has changes or a failure; if that is unknown, revert the diff."""
        try:
            with Collective(self.ranks, f"{topic}/changes") as collective:
                found = collective.gather(bool(diff.nnz or failure), bool)
                return collective.broadcast(any(found), bool)
        except errors.DeltaChainError:
            self.restore(diff)
            raise

    def restore(self, diff: Diff) -> None:
        with self._changing:
            self.snapshot.restore(diff)  # undoing it twice does no harm to a late anchor

    def redo(self, diff: Diff) -> None:
        with self._changing:
            self.snapshot.redo(diff)
            self._keep(diff.live)

    def renew(self, step: int | None) -> None:
        """Take another snapshot, and publish its difference from the newest version, if any."""
        self.abandon_anchors("the publisher was interrupted")
        self.settle()
        self.source.agree("renew")
        self.snapshot = Snapshot(self.source, where=self.config.snapshot)
        self.snapshot.on_change = self._keep
        if self.writer.parent is not None:
            catch_up(self, self.writer.parent, step=step)

    def settle(self) -> Version:
        self.writer.settle()
        if self.writer.parent is not None:
            self.head = self.writer.parent.version
        return self.head

    def commit(self, attempt: Attempt) -> Conclusion:
        """Commit the next version: every rank uploads its share, rank 0 concludes."""
        start = time.perf_counter()
        keys = self._keys("anchor" if attempt.diff is None else "delta", self.head + 1)
        with Collective(self.ranks, attempt.topic) as collective:
            shares = collective.gather(self._put_share(keys, attempt), EdgeShare)
            conclusion = None
            if self.ranks.leads:
                encode_s = time.perf_counter() - start
                conclusion = self._conclude(keys, attempt, shares, encode_s)
            conclusion = collective.broadcast(conclusion, Conclusion)
        self.head = conclusion.receipt.version
        return conclusion

    def _put_share(self, keys: EdgeKeys, attempt: Attempt) -> EdgeShare:
        if attempt.failure is not None:
            raise attempt.failure
        diff, store, raw = attempt.diff, self.writer.chain.store, self.encoding.own_arrays
        requests, part_nbytes = store.requests, self.config.part_nbytes
        metadata: Mapping[str, str] = {}
        if diff is None:
            raw = self.raw_anchors
            metadata = METADATA if self.config.anchor_format == "safetensors" else {}
            part_nbytes = anchor_part_nbytes(self.source.held_nbytes, part_nbytes)
        with EdgeUpload(
            store, keys, raw=raw, part_nbytes=part_nbytes, visible=False, metadata=metadata
        ) as upload:
            if diff is not None:
                with self._changing:
                    diff.complete()
                self._add_changes(upload, diff)
            elif attempt.base is None:
                self._add_all_bits(upload, attempt.bits)
            edge = upload.finish()
        return EdgeShare(
            edge=edge,
            state=(attempt.bits or self.snapshot).state,
            nnz=self.source.held_numel if diff is None else diff.nnz,
            requests=store.requests - requests,
            upload_s=upload.clock.seconds,
            copies={} if diff is None else self._copies,
        )

    def _conclude(
        self, keys: EdgeKeys, attempt: Attempt, shares: Sequence[EdgeShare], encode_s: float
    ) -> Conclusion:
        start, store = time.perf_counter(), self.writer.chain.store
        requests = sum(share.requests for share in shares) - store.requests
        state = sum((share.state for share in shares), StateDigest())
        for name in {name: 0 for share in shares for name in share.copies}:
            rows = enumerate(shares)
            check_copies(name, {n: one.copies[name] for n, one in rows if name in one.copies})
        edge = self._revealed(shares)
        if attempt.base is not None:
            edge = _base_edge(attempt.base, self.source.specs, state)
        nnz = sum(share.nnz for share in shares)
        upload_s = max(share.upload_s for share in shares)
        committed = self.writer.commit(
            edge,
            commit_id=keys.commit_id,
            state=state,
            step=attempt.step,
            nnz=nnz,
            ext=phases_mark({"diff": attempt.diff_s, "encode": encode_s, "upload": upload_s}),
        )
        receipt = PublishReceipt(
            version=committed.version,
            epoch=committed.manifest.epoch,
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
            restored=self.writer.chain.commits.take_restored(),
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

    def add_anchor(self, late: LateAnchor, *, topic: str) -> EdgeSummary:
        """Add an anchor that was begun; ``topic`` is a unique name of it among the ranks."""
        attempt, ranks = Attempt(topic=topic, bits=late.bits), self.anchor_ranks
        try:
            with Collective(ranks, topic) as collective:
                share = self._put_share(self._keys("anchor", late.version), attempt)
                shares = collective.gather(share, EdgeShare)
                summary = self._record(shares, late) if ranks.leads else None
                return collective.broadcast(summary, EdgeSummary)
        finally:
            with self._changing:
                self._late.remove(late)

    def _record(self, shares: Sequence[EdgeShare], late: LateAnchor) -> EdgeSummary:
        committed = late.committed
        if committed is None:
            raise errors.ChainError("an anchor follows a version, and there is none")
        state = sum((share.state for share in shares), StateDigest())
        if state != committed.state:
            raise errors.ChainError(
                f"the anchor has state {state}, version {committed.version} {committed.state}"
            )
        edge = self._revealed(shares)
        return self.writer.add_anchor(committed, edge, before=late.before)

    def _revealed(self, shares: Sequence[EdgeShare]) -> Edge:
        edges = [share.edge for share in shares]
        edge = Edge(
            kind=edges[0].kind,
            base=edges[0].base,
            encodings=tuple(sorted({name for edge in edges for name in edge.encodings})),
            parts=tuple(part for edge in edges for part in edge.parts),
        )
        self.writer.chain.store.reveal({part.key: part.pin for part in edge.parts})
        if edge.kind == "anchor" and self.config.anchor_format == "safetensors":
            name_checkpoint(self.writer.chain, edge)
        return edge

    def _keys(self, kind: PayloadKind, version: Version) -> EdgeKeys:
        epoch = self.writer.epoch
        return EdgeKeys(kind=kind, version=version, epoch=epoch, commit_id=uuid.uuid4().hex)

    def _add_changes(self, upload: EdgeUpload, diff: Diff) -> None:
        for found in diff.complete().by_tensor:
            places = found.weight.element_map
            whole = None if found.is_part else places.all_of(found.spec)
            run = places.run_of(found.spec) if self.encoding.needs_old else None
            change = sparse_change(
                found.spec,
                found.changes,
                found.digest,
                None if whole is None else self._reader(found.weight, whole),
                encoding=self.encoding,
                run=None if run is None else (self._reader(found.weight, run[0]), run[1]),
            )
            upload.add(change)

    def _reader(self, weight: Weight, select: slice) -> Callable[[], Bits]:
        return lambda: self.snapshot.reader(weight)(select)

    def _add_all_bits(self, upload: EdgeUpload, late: VersionBits | None) -> None:
        total, state = StateDigest(), (late or self.snapshot).state
        for weight in self.source.weights:
            read = self.snapshot.reader(weight) if late is None else late.take(weight).__getitem__
            for window in weight.element_map.windows(self._window_numel(weight)):
                known = None if late else self.snapshot.known_digest(weight, window)
                change = window_change(window, read(window.select), known)
                total += change.digest
                upload.add(change)
        if total != state:
            raise errors.UnsupportedModelError(
                "a frozen weight was changed in place: the anchor would not be the version",
                hint=COMPARED_WHOLE,
            )

    def _window_numel(self, weight: Weight) -> int:
        slots, part_nbytes = weight.element_map.slots, self.config.part_nbytes
        if weight.file is not None and not self.raw_anchors:
            return max(1, part_nbytes // weight.spec.itemsize)
        if all(weight.element_map.all_of(slot.spec) is not None for slot in slots):
            return max(slot.numel for slot in slots)  # windows without indices
        return max(1, part_nbytes // (INDEX_NBYTES + weight.spec.itemsize))


PART_NBYTES: Final = 64 << 20  # bytes of changes of one tensor that are found together
KEPT_NBYTES: Final = 64 << 20
"""Bytes of changes from the newest version to keep; to find more of them again takes no memory."""

_SAME_STORE: Final = (
    "every rank must reach the same store: share a folder between hosts, or use a bucket"
)


class Position(msgspec.Struct, frozen=True):
    chain: str
    epoch: int
    head: int  # -1 for none
    trusted: str  # public keys with commas between them; empty if all are trusted

    @classmethod
    def of(cls, writer: Writer) -> "Position":
        head, trusted = writer.parent, writer.chain.trust.trusted
        return cls(
            chain=writer.chain.identity.chain,
            epoch=writer.epoch,
            head=head.version if head else -1,
            trusted=str(trusted) if trusted else "",
        )


def begin(
    store: Store,
    collect: Callable[[], ModelTensors],
    config: PublishConfig,
    assets: Files,
    ranks: Ranks,
    layers: Callable[[ModelTensors, Files], Layers],
) -> Session:
    """Create the chain or take it over; its newest version then equals the current model."""
    with ExitStack() as undone:
        tenure = Tenure(store, take_over=config.take_over)
        undone.callback(tenure.close)
        source = divide(collect, ranks)
        described: Files = partial(_described, store, source, assets)
        files = described
        if (quantization := Quantization.chosen(config.quantization)) is not None:
            plain = source
            source, files = quantised(
                plain, lambda: layers(plain, assets), quantization, ranks, described
            )
        refuse_specs(source.specs)  # those of all ranks: every rank refuses
        source.agree("begin")
        with Collective(ranks, "begin") as collective:
            if config.anchor_format == "safetensors":
                refuse_parts(source)
            snapshot = Snapshot(source, where=config.snapshot)
            states = collective.gather(snapshot.state, StateDigest)  # every rank is ready
            state = sum(states, StateDigest())
            writer = _take_chain(tenure, source, config, files, state) if ranks.leads else None
            position = collective.broadcast(Position.of(writer) if writer else None, Position)
        with Collective(ranks, "open") as collective:
            writer = writer or _open_chain(store, source, config, position, ranks.number)
            collective.all_gather(True, bool)
        session = Session(source, snapshot, writer, config, ranks)
        if writer.parent is None:
            first_version(session)
        else:
            catch_up(session, writer.parent)
        undone.pop_all()
        return session


def _described(store: Store, source: ModelTensors, assets: Files) -> Mapping[str, bytes]:
    """Return the files of a chain, which must describe the tensors of an export if it is new."""
    files = assets()
    if not source.one_by_one or CONFIG_FILE not in files:
        return files
    specs = {spec.name: spec for spec in source.specs}
    if weights_file(specs, files) != ADAPTER_FILE and store.find(CHAIN_KEY) is None:
        refuse_other_folder(files, specs)
    return files


def _take_chain(
    tenure: Tenure, source: ModelTensors, config: PublishConfig, assets: Files, state: StateDigest
) -> Writer:
    chain = open_or_make(
        tenure.store,
        source.table(),
        lambda: with_dtype_of(assets(), source.specs),
        trust=Trust.of_writer(config.signing_key),
        base=config.base,
    )
    tenure.begin()
    if logger.isEnabledFor(logging.INFO):
        logger.info("publishing to %s", chain.store.url)
    else:  # a mistyped URL may be a folder
        sys.stderr.write(f"deltachain: publishing to {chain.store.url}\n")
    accept = partial(check_reverted, state=state, goes_on=config.continue_reverted)
    numel, metadata = source.numel, config.metadata
    try:
        writer = take_over(chain, numel=numel, metadata=metadata, accept=accept)
    except errors.PublisherFencedError as error:
        tenure.name(error)
        raise
    writer = writer or Writer(chain, numel=numel, metadata=metadata, parent=None)
    writer.tenure, tenure.look = tenure, writer.why_stopped
    return writer


def _open_chain(
    store: Store, source: ModelTensors, config: PublishConfig, position: Position, rank: int
) -> Writer:
    """Open the chain on a rank other than 0, which needs no signing key."""
    try:
        chain = Chain.open(store, Trust.of_reader(position.trusted, environment={}))
        if chain.identity.chain != position.chain:
            raise errors.ConfigError(
                f"{store.url} has chain {chain.identity.chain} on rank {rank}, "
                f"chain {position.chain} on rank 0",
                hint=_SAME_STORE,
            )
        parent = chain.read(position.head) if position.head >= 0 else None
    except errors.ObjectNotFoundError as exc:
        exc.hint = _SAME_STORE
        raise
    writer = Writer(chain, numel=source.numel, metadata=config.metadata, parent=parent)
    writer.epoch = position.epoch
    return writer


def first_version(session: Session, *, step: int | None = None) -> None:
    """Commit version 0: an anchor, or a reference to a base checkpoint."""
    session.commit(Attempt(topic="first", base=session.config.base, step=step))


class RankDifference(msgspec.Struct, frozen=True):
    state: StateDigest
    change: StateDigest | None = None  # None if the chain is unreadable
    nbytes: int = 0  # of a delta, about


def catch_up(session: Session, head: Committed, *, step: int | None = None) -> None:
    """Publish the difference of the snapshot from the newest version, if any, or an anchor."""
    with Collective(session.ranks, "states") as collective:
        states = collective.all_gather(session.snapshot.state, StateDigest)
    if sum(states, StateDigest()) == head.state:
        return
    with ExitStack() as reading:
        _catch_up(session, head, reading, step)


def _catch_up(session: Session, head: Committed, reading: ExitStack, step: int | None) -> None:
    with Collective(session.ranks, "difference") as collective:
        diff, nbytes = _difference(session, head, reading)
        mine = RankDifference(session.snapshot.state)
        if diff is not None:
            mine = RankDifference(session.snapshot.state, diff.digest, nbytes)
        found = collective.all_gather(mine, RankDifference)
    nbytes = sum(one.nbytes for one in found)
    if diff is not None and _is_proven(found, head) and nbytes < session.anchor_nbytes:
        logger.info("version %d continues from another state", head.version + 1)
    else:
        logger.warning("version %d starts over with an anchor", head.version + 1)
        diff = None
    session.commit(Attempt(topic="up", diff=diff, step=step))


def _is_proven(found: Sequence[RankDifference], head: Committed) -> bool:
    """Return whether every rank read the newest version with the state in its manifest."""
    changes = [one.change for one in found if one.change is not None]
    if len(changes) < len(found):
        return False
    states = sum((one.state for one in found), StateDigest())
    if head.state + sum(changes, StateDigest()) != states:
        logger.warning("version %d in the store is not what its manifest says", head.version)
        return False
    return True


def _difference(session: Session, head: Committed, reading: ExitStack) -> tuple[Diff | None, int]:
    """Find what changed since the newest version, and estimate its size.

    The version is read until ``reading`` is left.
    """
    chain, config = session.writer.chain, session.config
    kept, estimate = list[CheckpointChanges](), session.encoding.estimate
    held = nnz = nbytes = 0
    digest = StateDigest()
    try:
        plan = chain.plan(None, head)
        room = scratch()
        fetched = reading.enter_context(
            fetching(chain, plan, base=config.base, hold=False, room=room)
        )
        find = partial(_changes, fetched, session.source, session.snapshot)
        for one in find():
            digest, nnz = digest + one.digest, nnz + one.changes.indices.size
            held, nbytes = held + one.nbytes, nbytes + estimate(one.spec, one.changes)
            if held <= KEPT_NBYTES:
                kept.append(one)
            else:
                kept.clear()
    except UNREADABLE as exc:
        logger.warning("version %d cannot be rebuilt from the store: %s", head.version, exc)
        return None, 0
    mapped = Mapped({}, kept if held <= KEPT_NBYTES else _Again(find), digest)
    return Diff(nnz, lambda: mapped), nbytes


@dataclass(frozen=True, slots=True)
class _Again:
    """Changes that are found again by each loop over them."""

    find: Callable[[], Iterator[CheckpointChanges]]

    def __iter__(self) -> Iterator[CheckpointChanges]:
        return self.find()


def _changes(
    fetched: Fetched, source: ModelTensors, snapshot: Snapshot
) -> Iterator[CheckpointChanges]:
    """Yield what changed of each tensor, compared a window at a time; many changes in parts."""
    with Pool(cores(), "deltachain-compare") as pool:
        for weight in source.weights:
            found, nbytes, parts = list[Changes](), 0, 0
            compare = partial(_compare, fetched, snapshot.reader(weight))
            windows = weight.element_map.windows(FILE_NUMEL)
            for one in pool.ordered(
                compare,
                windows,
                ahead=2 * cores(),
                small=lambda one: len(one.indices) < SMALL_NUMEL,
            ):
                if found and nbytes > PART_NBYTES:
                    yield from _mapped(weight, found, is_part=True)
                    found, nbytes, parts = [], 0, parts + 1
                found += [one] if one.indices.size else []
                nbytes += sum(array.nbytes for array in one)
            if found:
                yield from _mapped(weight, found, is_part=parts > 0)


def _mapped(
    weight: Weight, found: Sequence[Changes], *, is_part: bool
) -> Iterator[CheckpointChanges]:
    indices, old, new = map(np.concatenate, zip(*found, strict=True))
    if weight.element_map.axes is not None:  # windows interleave
        order = np.argsort(indices, kind="stable")
        indices, old, new = indices[order], old[order], new[order]
    live = {weight.spec.name: Changes(indices, old, new)}
    return (one._replace(is_part=is_part) for one in map_changes(live, [weight]).by_tensor)


def _compare(fetched: Fetched, read: Callable[[Selection], Bits], window: AdjacentRuns) -> Changes:
    at, places = window.select, window.indices
    low, high = (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)
    values = fetched.tensor_plan(window.spec.name).read(low, high).within(low, high).values
    then = values if isinstance(places, range) else values[places - low]
    one = host.diff_(np.array(then), read(at))
    whole = one.indices + at.start if isinstance(at, slice) else at[one.indices]
    return one._replace(indices=whole)
