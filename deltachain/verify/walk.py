"""The walk along a chain that proves it version by version."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deltachain.chain.chain import Chain, Committed
from deltachain.chain.fetch import Fetched, fetch
from deltachain.chain.plan import Plan
from deltachain.errors import BrokenChainError, ChainError, MalformedError, ObjectNotFoundError
from deltachain.format import keys
from deltachain.format.documents import EdgeRecord, EdgeSummary
from deltachain.types import StateDigest, Version
from deltachain.verify.documents import (
    another,
    check_manifest,
    check_record,
    edge_records,
    history,
    newest,
    plan_from_nothing,
    way_behind,
)
from deltachain.verify.weights import Weights

PAYLOADS: Final = ("deltas/", "anchors/", "skips/")
"""What keys begin with that a lifecycle rule may take (FORMAT.md 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeProof:
    """One edge, every object of it read and decoded.

    Attributes:
        kind: As in the manifest.
        base: The version it starts from; ``None`` for nothing.
        key: Of its record, or of the manifest that it was committed with.
        nbytes: Bytes of its parts.
        parts: Objects.
        frames: Frames in them, each with a digest of its own.
        nnz: Elements decoded.
        proven: Whether it was shown to lead to the state of its version. An edge that starts before
            the versions asked for, or at one that is expired, can only be read.
        expired: Key of a part that is gone, of which a later anchor makes nobody need it.
        refetched: Objects that were corrupt when first read.
    """

    kind: str
    base: Version | None
    key: str
    nbytes: int
    parts: int
    frames: int
    nnz: int
    proven: bool
    refetched: tuple[str, ...]
    expired: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionProof:
    """One version: its manifest follows from the one before, its weights have its state.

    Where its payload expired the latter cannot be shown: ``rebuilt`` is then false.
    """

    version: Version
    epoch: int
    manifest: str
    state: StateDigest
    edges: tuple[EdgeProof, ...]
    rebuilt: bool = True


def verify(
    chain: Chain, *, first: Version = 0, last: Version | None = None, base: Path | None = None
) -> Iterator[VersionProof]:
    """Prove versions one by one; the first thing that is wrong ends it.

    A part that is gone is wrong only if versions behind it cannot be rebuilt up to the last one:
    else it has expired, as lifecycle rules make parts of old versions.

    Args:
        chain: Opened, so that its identity and table are known to belong together.
        first: Rebuilt from nothing by the cheapest plan.
        last: The newest version that is in the store, when not given.
        base: Where the base checkpoint lies here, if the chain starts from one.

    Raises:
        StoreError: An object cannot be read, or is gone and no later anchor stands in for it.
        ChainError: The versions do not form one chain.
        FormatError: An object is not what names it, or leads to another state.
    """
    end = newest(chain) if last is None else last
    if first > end:
        raise ChainError(f"version {first} is not committed, head is {end}", version=end)
    for _ in chain.assets():  # each is proven as it is read
        pass
    walk = _Walk(chain, base, first, end, edge_records(chain, first, end))
    before: Committed | None = None
    for committed in history(chain, first, end):
        check_manifest(chain, committed, before)
        yield walk.step(committed)
        before = committed
    if walk.lost is not None:
        raise walk.lost


class _Walk:
    """Carries the weights along the chain and proves what lies on the way.

    Args:
        chain: Read.
        base: Where the base checkpoint lies.
        first: The version to start at.
        last: The version to end at.
        records: Edges that were added later, of the versions to walk.

    Attributes:
        lost: Says which part is gone since which no version could be rebuilt.
    """

    def __init__(
        self,
        chain: Chain,
        base: Path | None,
        first: Version,
        last: Version,
        records: tuple[tuple[EdgeRecord, EdgeSummary], ...],
    ) -> None:
        self._chain = chain
        self._base = base
        self._first, self._last = first, last
        self._records = records
        self._specs = {spec.name: spec for spec in chain.table.specs()}
        self._weights = Weights(self._specs)
        self.lost: ObjectNotFoundError | None = None
        self._known: dict[tuple[Version, str], EdgeSummary] = {}
        self._skips: dict[Version, list[EdgeProof]] = defaultdict(list)

    def step(self, committed: Committed) -> VersionProof:
        """Go to the next version."""
        version, manifest = committed.version, committed.manifest
        own = manifest.summary()
        self._known[version, ""] = own
        proofs = [self._begin(committed) if version == self._first else self._go(own)]
        for record, summary in self._records:
            if record.version == version:
                check_record(record, summary.record, committed)
                self._known[version, summary.record] = summary
                if summary.base is None:
                    proofs.append(self._prove(summary, write=self.lost is not None))
                elif summary.base < self._first:
                    proofs.append(self._read(summary))
        self._check_window(committed)
        self._leave(committed)
        return VersionProof(
            version=version,
            epoch=manifest.epoch,
            manifest=committed.digest,
            state=committed.state,
            edges=(*proofs, *self._skips.pop(version, ())),
            rebuilt=self.lost is None,
        )

    def _begin(self, committed: Committed) -> EdgeProof:
        """Rebuild the first version from nothing, by the cheapest way that is there."""
        own, gone = committed.manifest.summary(), list[EdgeSummary]()
        if own.base is None:
            return self._prove(own, write=True)
        while True:
            try:
                edges = plan_from_nothing(self._chain, committed, gone).edges
            except BrokenChainError:
                if self.lost is None:
                    raise
                return self._read(own)
            for edge in edges:
                proof = self._prove(edge, write=True)
                if proof.expired:
                    gone.append(edge)
                    break
            else:
                self._check_state(committed)
                return proof if own == edges[-1] else self._read(own)

    def _check_state(self, committed: Committed) -> None:
        if self._weights.state != committed.state:
            key = keys.manifest_key(committed.version)
            raise another(f"{key}: state", self._weights.state, committed.state, key=key)

    def _go(self, own: EdgeSummary) -> EdgeProof:
        """Apply the version's own edge."""
        return self._prove(own, write=True)

    def _leave(self, committed: Committed) -> None:
        """Prove the skips that start here, while the weights are those of their base."""
        for record, summary in self._records:
            if summary.base == committed.version:
                if record.base_state != committed.manifest.state:
                    raise another(
                        f"{summary.record}: base state",
                        committed.state,
                        record.base_state,
                        key=summary.record,
                    )
                proof = self._prove(summary)
                self._skips[summary.version].append(proof)

    def _prove(self, edge: EdgeSummary, *, write: bool = False) -> EdgeProof:
        """Show that an edge leads to its state, and with ``write`` go there.

        Where its parts are gone, or nobody knows the weights that it starts from, it is only read.
        """
        if edge.base is not None and self.lost is not None:
            return self._read(edge)
        try:
            fetched = self._fetch(edge)
        except ObjectNotFoundError as exc:
            proof = _expired(edge, exc)
            if write and self.lost is None:
                self.lost, self._weights = exc, Weights(self._specs)
            return proof
        self._weights.prove(fetched, StateDigest.parse(edge.state), write=write)
        if write:
            self.lost = None
        return _proof(fetched, proven=True)

    def _read(self, edge: EdgeSummary) -> EdgeProof:
        """Read an edge that cannot be proven."""
        try:
            return _proof(self._fetch(edge), proven=False)
        except ObjectNotFoundError as exc:
            return _expired(edge, exc)

    def _fetch(self, edge: EdgeSummary) -> Fetched:
        plan = Plan(held=edge.base, target=edge.version, edges=(edge,))
        fetched = fetch(self._chain, plan, base=self._base)
        for part in fetched.parts:
            part.verify()
        found = {row.encoding for part in fetched.parts for row in part.rows.values()}
        if found != set(edge.encodings):
            key = edge.record or keys.manifest_key(edge.version)
            listed = ", ".join(edge.encodings) or "none"
            raise MalformedError(
                f"{key}: lists encodings {listed}, its parts have {', '.join(sorted(found))}",
                key=key,
            )
        return fetched

    def _check_window(self, committed: Committed) -> None:
        """What a manifest lists of the versions before it is what is there, and complete."""
        version, manifest = committed.version, committed.manifest
        key = keys.manifest_key(version)
        listed = {(edge.version, edge.record): edge for edge in manifest.recent}
        for place, edge in listed.items():
            if edge.version >= self._first and self._known.get(place) != edge:
                self._check_there(edge, key)
                raise MalformedError(
                    f"{key}: lists a {edge.kind} to version {edge.version} that differs from the "
                    "stored record",
                    key=key,
                )
        reach = max(self._first, manifest.window_from)
        absent = [v for v in range(reach, version) if (v, "") not in listed]
        if absent:
            raise MalformedError(
                f"{key}: its window from {manifest.window_from} leaves out version {absent[0]}",
                key=key,
            )

    def _check_there(self, edge: EdgeSummary, key: str) -> None:
        """The record of an edge that a manifest lists is there, whatever it says."""
        if edge.record and self._chain.store.find(edge.record) is None:
            back = f"put {edge.record} back from a backup"
            raise ObjectNotFoundError(
                f"{edge.record} is gone, which {key} lists",
                key=edge.record,
                url=self._chain.store.url,
                hint=way_behind(self._chain, back, edge.version, self._last),
            )


def _expired(edge: EdgeSummary, gone: ObjectNotFoundError) -> EdgeProof:
    """An edge whose payload is gone; documents are never to go."""
    if not gone.key.startswith(PAYLOADS):
        raise gone
    return EdgeProof(
        kind=edge.kind,
        base=edge.base,
        key=edge.record or keys.manifest_key(edge.version),
        nbytes=0,
        parts=0,
        frames=0,
        nnz=0,
        proven=False,
        refetched=(),
        expired=gone.key,
    )


def _proof(fetched: Fetched, *, proven: bool) -> EdgeProof:
    edge = fetched.plan.edges[0]
    streams = (row for part in fetched.parts for row in part.directory.streams)
    return EdgeProof(
        kind=edge.kind,
        base=edge.base,
        key=edge.record or keys.manifest_key(edge.version),
        nbytes=fetched.nbytes,
        parts=len(fetched.parts),
        frames=sum(len(row.stored) for row in streams),
        nnz=sum(part.nnz for part in fetched.parts),
        proven=proven,
        refetched=fetched.refetched,
    )
