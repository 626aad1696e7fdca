"""One model on one chain: the diff of a snapshot becomes a committed version."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from deltachain.codec import Change
from deltachain.errors import ConfigError
from deltachain.keys import PayloadKind
from deltachain.manifest import Edge, EdgeSummary
from deltachain.plan import REQUEST_NBYTES
from deltachain.publish.config import PublishConfig
from deltachain.publish.receipt import PublishReceipt
from deltachain.publish.snapshot import Diff, Snapshot
from deltachain.publish.source import Source
from deltachain.publish.upload import DENSE_SHARE, Slot, dense_change, sparse_change, upload
from deltachain.publish.writer import Draft, Writer
from deltachain.types import StateDigest


@dataclass(frozen=True)
class Session:
    """What a publisher works with once it is attached.

    Attributes:
        source: The live weights.
        snapshot: Their bits as last published.
        writer: The position in the chain.
        config: The publisher's settings.
    """

    source: Source
    snapshot: Snapshot
    writer: Writer
    config: PublishConfig

    @cached_property
    def numel(self) -> int:
        """Elements in all."""
        return sum(weight.spec.numel for weight in self.source.weights)

    @cached_property
    def anchor_nbytes(self) -> int:
        """About the bytes of an anchor."""
        return int(DENSE_SHARE * sum(weight.spec.nbytes for weight in self.source.weights))

    def put_anchor(self, slot: Slot) -> Edge:
        """Put all bits of the snapshot as the parts of an anchor; nothing names them yet.

        Raises:
            ConfigError: They do not have the state of the snapshot.
        """
        total = StateDigest()

        def changes() -> Iterator[Change]:
            nonlocal total
            for weight in self.source.weights:
                change = dense_change(weight.spec, self.snapshot.bits(weight))
                total += change.digest
                yield change

        edge = self._upload(slot, changes())
        if total != self.snapshot.state:
            raise ConfigError(
                "a frozen weight was changed in place: the anchor would not be the version",
                hint="what changes must be trainable, or a buffer, when the publisher attaches",
            )
        return edge

    def put_delta(self, slot: Slot, diff: Diff) -> Edge:
        """Put a diff as the parts of a delta; nothing names them yet."""
        return self._upload(slot, self._changes(diff))

    def commit_diff(self, diff: Diff, *, step: int | None, diff_s: float) -> PublishReceipt:
        """Encode, put and commit a diff as the next version.

        Raises:
            StoreError: It is not committed, or nobody can tell.
            PublisherFencedError: Another publisher was first.
        """
        start = time.perf_counter()
        store = self.writer.chain.store
        requests = store.requests
        nnz = sum(changes.indices.size for changes in diff.values())
        draft = self.writer.draft(state=self.snapshot.state, step=step, nnz=nnz)
        edge = self.put_delta(slot_of("delta", draft), diff)
        encoded = time.perf_counter()
        committed = self.writer.commit(draft, edge)
        return PublishReceipt(
            version=committed.version,
            epoch=draft.epoch,
            kind=edge.kind,
            step=step,
            state=draft.state,
            nnz=nnz,
            numel=self.numel,
            nbytes=edge.nbytes,
            diff_s=diff_s,
            requests=store.requests - requests,
            encode_s=encoded - start,
            commit_s=time.perf_counter() - encoded,
            kernel=self.snapshot.kernel,
        )

    def add_anchor(self) -> EdgeSummary | None:
        """Add an anchor of the newest version, if a newcomer would pay too much without one."""
        limit = self.config.anchor_factor * (self.anchor_nbytes + 2 * REQUEST_NBYTES)
        committed = self.writer.parent
        if committed is None or self.writer.newcomer_cost <= limit:
            return None
        slot = Slot(
            kind="anchor",
            version=committed.version,
            epoch=self.writer.epoch,
            commit_id=uuid.uuid4().hex,
        )
        return self.writer.add_anchor(committed, self.put_anchor(slot))

    def _changes(self, diff: Diff) -> Iterator[Change]:
        absolute = self.config.encoding != "step"
        for weight in self.source.weights:
            changed = diff.get(weight.spec.name)
            if changed is not None:
                bits = self.snapshot.bits(weight)
                yield sparse_change(weight.spec, changed, bits, absolute=absolute)

    def _upload(self, slot: Slot, changes: Iterator[Change]) -> Edge:
        raw = self.config.encoding == "raw"
        part_nbytes = self.config.part_nbytes
        return upload(self.writer.chain, slot, changes, raw=raw, part_nbytes=part_nbytes)


def slot_of(kind: PayloadKind, draft: Draft) -> Slot:
    """Where the parts of a draft's own edge go."""
    return Slot(kind=kind, version=draft.version, epoch=draft.epoch, commit_id=draft.commit_id)
