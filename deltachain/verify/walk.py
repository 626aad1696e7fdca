"""Verification of a chain, version by version."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deltachain.chain.chain import Chain, Committed
from deltachain.chain.fetch import Fetched, fetch
from deltachain.chain.plan import Plan
from deltachain.chain.reachable import plan_present
from deltachain.errors import (
    BrokenChainError,
    ChainError,
    ConfigError,
    MalformedError,
    ObjectNotFoundError,
)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeProof:
    """Result for one edge, all of whose objects were read and decoded.

    Attributes:
        kind: Kind of the edge.
        base: The version it starts from; ``None`` for nothing.
        key: Key of its edge record or manifest.
        nbytes: Size of its parts, in bytes.
        parts: Number of its parts.
        frames: Number of frames in them, each with a digest of its own.
        nnz: Number of decoded elements.
        proven: Whether it leads to the state of its version. An edge from before the first verified
            version, or from an expired one, can only be read.
        expired: Key of a missing part that a later anchor makes unnecessary; empty for none.
        pruned: Whether it expired because a prune record names the edge.
        refetched: Keys of objects that were corrupt on the first read.
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
    pruned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionProof:
    """Result for one version: its manifest follows its parent, its weights have its state.

    If its payload has expired, the weights cannot be checked, and ``rebuilt`` is false.

    Attributes:
        signatures: Ids of the keys in the manifest's signatures.
        signed_by: Those that are trusted, and whose signature is true; empty without trusted keys.
    """

    version: Version
    epoch: int
    manifest: str
    state: StateDigest
    edges: tuple[EdgeProof, ...]
    rebuilt: bool = True
    signatures: tuple[str, ...] = ()
    signed_by: tuple[str, ...] = ()


def verify(
    chain: Chain, *, first: Version = 0, last: Version | None = None, base: Path | None = None
) -> Iterator[VersionProof]:
    """Verify versions one by one; stop at the first error.

    A missing part is an error only if later versions cannot be rebuilt without it. Otherwise it
    counts as expired, as lifecycle rules delete parts of old versions.

    Args:
        chain: An open chain.
        first: The first version, rebuilt from nothing by the cheapest plan.
        last: The last version; the newest in the store if ``None``.
        base: Local folder of the base checkpoint, if the chain starts from one.

    Raises:
        ConfigError: ``first`` is greater than ``last``.
        StoreError: An object cannot be read, or is gone and no later anchor replaces it.
        ChainError: The versions do not form one chain.
        FormatError: An object has another digest, or leads to another state.
    """
    head = newest(chain)
    end = head if last is None else last
    if end < first <= head:
        raise ConfigError(
            f"version {first}, the first to verify, is after version {end}, the last one",
            hint="swap the two",
        )
    if first > end:
        raise ChainError(
            f"version {first} is not committed, head is {head}",
            version=head,
            hint="name a version up to the head, or wait until it is committed",
        )
    for _ in chain.assets():  # verified while read
        pass
    chain.prunes.newest()
    walk = _Walk(chain, base, first, end, edge_records(chain, first, end))
    before: Committed | None = None
    for committed in history(chain, first, end):
        check_manifest(chain, committed, before)
        yield walk.step(committed)
        before = committed
    if walk.lost is not None:
        raise walk.lost


class _Walk:
    """Carries the weights from version to version and verifies each edge.

    Args:
        chain: The chain.
        base: Local folder of the base checkpoint.
        first: The first version.
        last: The last version.
        records: Edge records of these versions.

    Attributes:
        lost: Error for the missing part, or the pruned first version, since which no version can
            be rebuilt; ``None`` for none. The weights are then those of an earlier version, from
            which a skip may lead on.
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
        self.lost: ObjectNotFoundError | BrokenChainError | None = None
        self._at: Version | None = None  # of the weights
        self._known: dict[tuple[Version, str], EdgeSummary] = {}
        self._skips: dict[Version, list[EdgeProof]] = defaultdict(list)

    def step(self, committed: Committed) -> VersionProof:
        """Verify the next version."""
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
                elif self.lost is not None and summary.base == self._at:
                    self._skips.pop(version, None)  # it was proven there, and leads on here
                    proofs.append(self._prove(summary, write=True))
                else:
                    if summary.base < self._first:
                        proofs.append(self._read(summary))
                    if self.lost is not None:
                        self._rebuild(committed)
        self._check_window(committed)
        self._leave(committed)
        return VersionProof(
            version=version,
            epoch=manifest.epoch,
            manifest=committed.digest,
            state=committed.state,
            edges=(*proofs, *self._skips.pop(version, ())),
            rebuilt=self.lost is None,
            signatures=tuple(signature.key_id for signature in committed.signatures),
            signed_by=committed.signed_by,
        )

    def _begin(self, committed: Committed) -> EdgeProof:
        """Rebuild the first version from nothing by the cheapest plan."""
        own, gone = committed.manifest.summary(), list[EdgeSummary]()
        if own.base is None:
            return self._prove(own, write=True)
        while True:
            try:
                edges = plan_from_nothing(self._chain, committed, gone).edges
            except BrokenChainError as exc:
                if self.lost is None:
                    if not self._chain.prunes.is_pruned(own):
                        raise
                    self.lost = exc
                return self._read(own)
            for edge in edges:
                proof = self._prove(edge, write=True)
                if proof.expired:
                    gone.append(edge)
                    break
            else:
                self._check_state(committed)
                return proof if own == edges[-1] else self._read(own)

    def _rebuild(self, committed: Committed) -> None:
        """Rebuild a version from nothing, if a skip leads on where the line of deltas ended."""
        try:
            plan = plan_present(self._chain, None, committed)
        except BrokenChainError:
            return
        if all(not self._prove(edge, write=True).expired for edge in plan.edges):
            self._check_state(committed)

    def _check_state(self, committed: Committed) -> None:
        if self._weights.state != committed.state:
            key = keys.manifest_key(committed.version)
            raise another(f"{key}: state", self._weights.state, committed.state, key=key)

    def _go(self, own: EdgeSummary) -> EdgeProof:
        """Apply the version's own edge."""
        return self._prove(own, write=True)

    def _leave(self, committed: Committed) -> None:
        """Verify the skips that start here, while the weights are those of their base."""
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
        """Verify that an edge leads to its state; with ``write``, apply it to the weights.

        An edge with expired parts or an unknown base is only read.
        """
        if edge.base is not None and self.lost is not None and edge.base != self._at:
            return self._read(edge)
        try:
            fetched = self._fetch(edge)
        except ObjectNotFoundError as exc:
            proof = self._expired(edge, exc)
            if write and self.lost is None:
                self.lost = exc
            return proof
        self._weights.prove(fetched, StateDigest.parse(edge.state), write=write)
        if write:
            self.lost, self._at = None, edge.version
        return _proof(fetched, proven=True)

    def _read(self, edge: EdgeSummary) -> EdgeProof:
        """Read an edge whose base weights are unknown."""
        try:
            return _proof(self._fetch(edge), proven=False)
        except ObjectNotFoundError as exc:
            return self._expired(edge, exc)

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
        """Check that the listed recent edges equal the stored ones and are complete."""
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
                f"{key}: its window from {manifest.window_from} lacks version {absent[0]}",
                key=key,
            )

    def _check_there(self, edge: EdgeSummary, key: str) -> None:
        """Check that the record of a listed edge exists."""
        if edge.record and self._chain.store.find(edge.record) is None:
            back = f"restore {edge.record} from a backup"
            raise ObjectNotFoundError(
                f"{edge.record} is gone, although {key} lists it",
                key=edge.record,
                url=self._chain.store.url,
                hint=way_behind(self._chain, back, edge.version, self._last),
            )

    def _expired(self, edge: EdgeSummary, gone: ObjectNotFoundError) -> EdgeProof:
        """Build the result of an edge whose payload is gone; re-raise for a document."""
        if not gone.key.startswith(keys.PAYLOADS):
            raise gone
        prunes = self._chain.prunes
        if not prunes.is_pruned(edge):
            prunes.refresh()  # it may have been pruned since the verification began
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
            pruned=prunes.is_pruned(edge),
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
