"""Verification of a chain in its store: every document, object and state.

No statement of the chain is trusted. The weights are rebuilt from nothing and carried from version
to version; each edge (delta, anchor, skip) must lead from the state of its base to the state of its
version.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from deltachain import errors
from deltachain.chain.chain import Chain, Committed, plan_present
from deltachain.chain.fetch import Fetched, Room, fetching, scratch
from deltachain.chain.plan import Plan
from deltachain.chain.tensor_plan import TensorPlan
from deltachain.codec import ENCODINGS
from deltachain.codec.container import TensorRow
from deltachain.codec.rows import RowDigests
from deltachain.delta import ABSOLUTE, WINDOW_NBYTES, OldBits, TensorDelta, fold_within, pieces
from deltachain.format import keys
from deltachain.format.documents import EdgeRecord, EdgeSummary, summarise, unseal
from deltachain.format.keys import digest_key, object_digest
from deltachain.kernels import host
from deltachain.kernels.protocol import Move, move
from deltachain.threads import Pool, cores
from deltachain.types import Bits, StateDigest, TensorSpec, Version

logger = logging.getLogger(__name__)


def newest(chain: Chain) -> Version:
    listed = [keys.version_of(info.key) for info in chain.store.list("manifests/")]
    head = chain.head()
    known = [version for version in listed if version is not None]
    known += [head.version] if head else []
    if not known:
        raise errors.no_version(chain.store.url)
    return max(known)


def history(chain: Chain, first: Version, last: Version) -> Iterator[Committed]:
    """Yield manifests in order; the hint of an error names the version to verify from."""
    try:
        yield from chain.history(first, last)
    except errors.BrokenChainError as exc:
        version = first if exc.version is None else exc.version
        lost = version if chain.find(version) is None else version - 1
        back = f"restore {keys.manifest_key(lost)} from a backup"
        exc.hint = way_behind(chain, back, lost, last)
        raise
    except errors.FormatError as exc:
        at = keys.version_of(exc.key)
        if at is not None:
            exc.hint = way_behind(chain, exc.hint, at, last)
        raise


def way_behind(chain: Chain, back: str, lost: Version, last: Version) -> str:
    for version in range(lost + 1, last + 1):
        with suppress(errors.BrokenChainError, errors.FormatError, errors.ObjectNotFoundError):
            plan_from_nothing(chain, chain.read(version), [])
            url = chain.store.url
            return f"{back}; `deltachain verify {url} --from {version}` verifies later versions"
    return f"{back}; no later version can be rebuilt: publish an anchor"


def plan_from_nothing(chain: Chain, committed: Committed, avoid: list[EdgeSummary]) -> Plan:
    while True:
        plan = chain.plan(None, committed, avoid=avoid)
        lost = [edge for edge in plan.edges if not _is_there(chain, edge)]
        if not lost:
            return plan
        avoid += lost


def _is_there(chain: Chain, edge: EdgeSummary) -> bool:
    try:
        chain.edge(edge)
    except errors.ObjectNotFoundError:
        return False
    return True


def edge_records(
    chain: Chain, first: Version, last: Version
) -> tuple[tuple[EdgeRecord, EdgeSummary], ...]:
    found = []
    for info in chain.store.list("edges/"):
        version = keys.version_of(info.key)
        if version is None or not first <= version <= last:
            continue
        data = bytes(chain.store.read(info.key, nbytes=info.nbytes, pin=info.pin))
        record = unseal(data, EdgeRecord, key=info.key)
        edge = record.edge
        place = keys.edge_key(record.version, edge.kind, edge.base)
        if record.chain != chain.identity.chain or place != info.key:
            raise errors.MalformedError(
                f"{info.key}: is {place} of chain {record.chain}", key=info.key
            )
        digest = object_digest(data)
        _check_signed(chain, data, info.key, version)
        summary = summarise(version, edge, record.state, record=info.key, digest=digest)
        found.append((record, summary))
    return tuple(found)


def _check_signed(chain: Chain, data: bytes, key: str, version: Version) -> None:
    """Raise unless a record is signed, or a later manifest lists it; these are read if needed."""
    try:
        chain.check_listed(data, key)
    except errors.SignatureError:
        digest, later = object_digest(data), version + 1
        while (committed := chain.find(later)) is not None:
            if any(edge.digest == digest for edge in committed.manifest.recent):
                return
            later += 1
        raise


def check_manifest(chain: Chain, committed: Committed, before: Committed | None) -> None:
    manifest, key = committed.manifest, keys.manifest_key(committed.version)
    numel = sum(spec.numel for spec in chain.table.specs())
    if manifest.numel != numel:
        raise errors.MalformedError(
            f"{key}: {manifest.numel} elements, the table has {numel}", key=key
        )
    if manifest.edge.kind == "delta" and manifest.edge.base != committed.version - 1:
        raise errors.MalformedError(f"{key}: its delta starts from {manifest.edge.base}", key=key)
    if committed.version == 0 and (manifest.parent or manifest.base_state):
        raise errors.MalformedError(f"{key}: version 0 has a parent", key=key)
    if before is None:
        return
    if manifest.epoch < before.manifest.epoch:
        raise errors.ForkedChainError(
            f"{key}: epoch {manifest.epoch} after epoch {before.manifest.epoch}",
            version=committed.version,
        )
    if manifest.base_state != before.manifest.state:
        raise another(f"{key}: base state", before.state, manifest.base_state, key=key)


def check_record(record: EdgeRecord, key: str, committed: Committed) -> None:
    if record.manifest != committed.digest:
        raise another(f"{key}: manifest", committed.digest, record.manifest, key=key)
    if record.state != committed.manifest.state:
        raise another(f"{key}: state", committed.state, record.state, key=key)


def another(what: str, expected: object, actual: object, *, key: str) -> errors.DigestMismatchError:
    return errors.DigestMismatchError(what, expected=str(expected), actual=str(actual), key=key)


def counted(moved: Move[Any], row: TensorRow) -> StateDigest:
    return moved.change if ENCODINGS.get(row.encoding).sparse else moved.added


def _replaced(delta: TensorDelta, moved: Move[Any]) -> StateDigest:
    """Return the digest of old bits that a dense delta replaces; that of others is in ``moved``."""
    if delta.indices is not None:
        return StateDigest()
    return host.digest(digest_key(delta.spec), moved.old, delta.start)


class _TensorProof(NamedTuple):
    change: StateDigest  # of the state digest; of the new bits alone, from nothing
    rows: tuple[StateDigest, ...]  # what each row decodes to, as its digest counts it


class Weights:
    """Bits of all tensors, in a file without a name while the disk has room, and their digests."""

    def __init__(self, specs: Mapping[str, TensorSpec]) -> None:
        self.specs, self.digests = specs, dict[str, StateDigest]()
        self._room = Room(scratch(), 0)
        self._places: dict[str, int | Bits] = {}

    @property
    def state(self) -> StateDigest:
        return sum(self.digests.values(), StateDigest())

    def prove(self, fetched: Fetched, expected: StateDigest, *, write: bool) -> None:
        edge = fetched.plan.edges[0]
        key = edge.record or keys.manifest_key(edge.version)
        after = {} if edge.base is None else dict(self.digests)
        digests = [RowDigests(part.rows.values()) for part in fetched.parts]
        prove = partial(self._prove, fetched, key, write=write)
        with Pool(cores(), "deltachain-verify") as pool:
            proofs = pool.ordered(prove, fetched.names, ahead=2 * cores())
            for name, found in zip(fetched.names, proofs, strict=True):
                mine = [
                    one for one, p in zip(digests, fetched.parts, strict=True) if name in p.rows
                ]
                for one, change in zip(mine, found.rows, strict=True):
                    total = one.add(name, change)
                    if total is not None and total.actual != total.expected:
                        raise another(f"{key}: {one.named(name)}", *total, key=key)
                after[name] = after.get(name, StateDigest()) + found.change
        if absent := self.specs.keys() - after.keys():
            raise errors.BrokenChainError(
                f"{key}: does not give {min(absent)!r}", version=edge.version
            )
        actual = sum(after.values(), StateDigest())
        if actual != expected:
            what = f"{key}: the {edge.kind} leads to another state than version {edge.version}"
            raise another(what, expected, actual, key=key)
        if write:
            self.digests = after

    def _prove(self, fetched: Fetched, key: str, name: str, *, write: bool) -> _TensorProof:
        """Decode a tensor window by window; write each once the next one has been decoded.

        Until then segments of the next one may need bits before the edge.
        """
        given, spec = fetched.tensor_plan(name), self.specs[name]
        alone = [replace(given, parts=(one,), edges=(), from_nothing=False) for one in given.parts]
        change, sums = StateDigest(), [StateDigest() for _ in alone]
        left = sum(part.rows[name].nnz for part in given.parts)
        late: list[TensorDelta] = []
        for _, low, high in pieces([spec], WINDOW_NBYTES):
            read = self._read(given, alone or [given], low, high)
            delta = fold_within([one for one in read if one.nnz] or read[:1], low, high)
            if given.from_nothing and not delta.covers(low, high):
                raise errors.BrokenChainError(f"{key}: does not give all of {name!r}")
            before = delta.values if given.from_nothing else self.bits(spec, low, high)
            for number, (part, one) in enumerate(zip(given.parts, read, strict=False)):
                sums[number] += counted(move(before, one, low), part.rows[name])
            moved, left = move(before, delta, low), left - delta.nnz
            change += moved.change
            change -= StateDigest() if given.from_nothing else _replaced(delta, moved)
            late.append(replace(delta, values=moved.new, absolute=ABSOLUTE))
            if write and len(late) > 1:
                self.put(late[-2])
            del late[:-1]
        if write:
            self.put(late[0])
        if left > 0:
            raise errors.MalformedError(f"{key}: gives elements of {name!r} twice", key=key)
        return _TensorProof(change, tuple(sums))

    def _read(
        self, given: TensorPlan, alone: Sequence[TensorPlan], low: int, high: int
    ) -> list[TensorDelta]:
        old = None if given.from_nothing else partial(self._old, given.spec)
        return [plan.read(low, high, old).within(low, high) for plan in alone]

    def put(self, delta: TensorDelta) -> None:
        """Write new bits of consecutive elements, or of few that are near one another."""
        if not delta.nnz:
            return
        spec, low, bits = delta.spec, delta.start, delta.values
        if delta.indices is not None:
            low = int(delta.indices[0])
            bits = self.bits(spec, low, int(delta.indices[-1]) + 1)
            host.scatter_(bits, delta.indices - low, delta.values)
        place = self._place(spec)
        if isinstance(place, int):
            self._room.write(bits.view(np.uint8).data, place + low * spec.itemsize)
        else:
            place[low : low + bits.size] = bits

    def _old(self, spec: TensorSpec, low: int, high: int) -> OldBits:
        return OldBits(self.bits(spec, low, high), low, shared=True)

    def bits(self, spec: TensorSpec, low: int, high: int) -> Bits:
        place = self._place(spec)
        if not isinstance(place, int):
            return place[low:high]
        data = self._room.read(place, low * spec.itemsize, (high - low) * spec.itemsize)
        return np.frombuffer(data, spec.bits_dtype)

    def _place(self, spec: TensorSpec) -> int | Bits:
        """Return the offset of a tensor in the file, or its bits in memory."""
        if spec.name not in self._places:
            try:
                self._places[spec.name] = self._room.take(spec.nbytes)
            except OSError as exc:
                logger.info("%s is held in memory: %s", spec.name, exc)
                self._places[spec.name] = np.empty(spec.numel, spec.bits_dtype)
        return self._places[spec.name]


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeProof:
    """Result for one edge, all of whose objects were read and decoded."""

    kind: str
    base: Version | None  # the version it starts from; None for nothing
    key: str  # key of its edge record or manifest
    nbytes: int  # size of its parts, in bytes
    parts: int  # number of its parts
    frames: int  # number of frames in them, each with a digest of its own
    nnz: int
    proven: bool  # whether it leads to its state; one from an unverified version is only read
    refetched: tuple[str, ...]  # keys of objects that were corrupt on the first read
    expired: str = ""  # key of a missing part that a later anchor makes unnecessary; empty for none
    pruned: bool = False  # whether it expired because a prune record names the edge


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionProof:
    """Result for one version: its manifest follows its parent, its weights have its state.

    If its payload has expired, the weights cannot be checked, and ``rebuilt`` is false.
    """

    version: Version
    epoch: int
    manifest: str
    state: StateDigest
    edges: tuple[EdgeProof, ...]
    rebuilt: bool = True
    signatures: tuple[str, ...] = ()  # ids of the keys in the manifest's signatures
    signed_by: tuple[str, ...] = ()  # those that are trusted, with true signatures


def verify(
    chain: Chain, *, first: Version = 0, last: Version | None = None, base: Path | None = None
) -> Iterator[VersionProof]:
    """Verify versions one by one; stop at the first error.

    A missing part that later versions do not need counts as expired.
    """
    head = newest(chain)
    end = head if last is None else last
    if end < first <= head:
        raise errors.ConfigError(
            f"version {first}, the first to verify, is after version {end}, the last one",
            hint="swap the two",
        )
    if first > end:
        raise errors.ChainError(
            f"version {first} is not committed, head is {head}",
            version=head,
            hint="name a version up to the head, or wait until it is committed",
        )
    for _ in chain.assets():  # verified while read
        pass
    chain.prunes.newest()
    weights = Weights({spec.name: spec for spec in chain.table.specs()})
    walk = _Walk(chain, base, first, end, edge_records(chain, first, end), weights)
    before: Committed | None = None
    for committed in history(chain, first, end):
        check_manifest(chain, committed, before)
        yield walk.step(committed)
        before = committed
    if walk.lost is not None:
        raise walk.lost


@dataclass(slots=True)
class _Walk:
    """Carries the weights from version to version and verifies each edge.

    ``lost``: why no version could be rebuilt since the weights' own; a skip may lead on.
    """

    _chain: Chain
    _base: Path | None
    _first: Version
    _last: Version
    _records: tuple[tuple[EdgeRecord, EdgeSummary], ...]
    _weights: Weights
    lost: errors.ObjectNotFoundError | errors.BrokenChainError | None = None
    _at: Version | None = None  # of the weights
    _known: dict[tuple[Version, str], EdgeSummary] = field(default_factory=dict)
    _skips: dict[Version, list[EdgeProof]] = field(default_factory=lambda: defaultdict(list))

    def step(self, committed: Committed) -> VersionProof:
        version, manifest = committed.version, committed.manifest
        own = manifest.summary()
        self._known[version, ""] = own
        proofs = [
            self._begin(committed) if version == self._first else self._prove(own, write=True)
        ]
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
            except errors.BrokenChainError as exc:
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
        try:
            plan = plan_present(self._chain, None, committed)
        except errors.BrokenChainError:
            return
        if all(not self._prove(edge, write=True).expired for edge in plan.edges):
            self._check_state(committed)

    def _check_state(self, committed: Committed) -> None:
        if self._weights.state != committed.state:
            key = keys.manifest_key(committed.version)
            raise another(f"{key}: state", self._weights.state, committed.state, key=key)

    def _leave(self, committed: Committed) -> None:
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
        """Verify that an edge leads to its state, or just read it; with ``write``, apply it."""
        if edge.base is not None and self.lost is not None and edge.base != self._at:
            return self._read(edge)
        try:
            with self._fetching(edge) as fetched:
                self._weights.prove(fetched, StateDigest.parse(edge.state), write=write)
        except errors.ObjectNotFoundError as exc:
            proof = self._expired(edge, exc)
            if write and self.lost is None:
                self.lost = exc
            return proof
        if write:
            self.lost, self._at = None, edge.version
        return _proof(edge, fetched, proven=True)

    def _read(self, edge: EdgeSummary) -> EdgeProof:
        try:
            with self._fetching(edge) as fetched:
                for part in fetched.parts:
                    part.verify()
        except errors.ObjectNotFoundError as exc:
            return self._expired(edge, exc)
        return _proof(edge, fetched, proven=False)

    @contextmanager
    def _fetching(self, edge: EdgeSummary) -> Iterator[Fetched]:
        plan = Plan(held=edge.base, target=edge.version, edges=(edge,))
        room = scratch()
        with fetching(self._chain, plan, base=self._base, hold=False, room=room) as fetched:
            self._check_encodings(edge, fetched)
            yield fetched

    def _check_encodings(self, edge: EdgeSummary, fetched: Fetched) -> None:
        found = {row.encoding for part in fetched.parts for row in part.rows.values()}
        if found != set(edge.encodings):
            key = edge.record or keys.manifest_key(edge.version)
            listed = ", ".join(edge.encodings) or "none"
            raise errors.MalformedError(
                f"{key}: lists encodings {listed}, its parts have {', '.join(sorted(found))}",
                key=key,
            )

    def _check_window(self, committed: Committed) -> None:
        version, manifest = committed.version, committed.manifest
        key = keys.manifest_key(version)
        listed = {(edge.version, edge.record): edge for edge in manifest.recent}
        for place, edge in listed.items():
            if edge.version >= self._first and self._known.get(place) != edge:
                self._check_there(edge, key)
                raise errors.MalformedError(
                    f"{key}: lists a {edge.kind} to version {edge.version} that differs from the "
                    "stored record",
                    key=key,
                )
        reach = max(self._first, manifest.window_from)
        absent = [v for v in range(reach, version) if (v, "") not in listed]
        if absent:
            raise errors.MalformedError(
                f"{key}: its window from {manifest.window_from} lacks version {absent[0]}", key=key
            )

    def _check_there(self, edge: EdgeSummary, key: str) -> None:
        if edge.record and self._chain.store.find(edge.record) is None:
            back = f"restore {edge.record} from a backup"
            raise errors.ObjectNotFoundError(
                f"{edge.record} is gone, although {key} lists it",
                key=edge.record,
                url=self._chain.store.url,
                hint=way_behind(self._chain, back, edge.version, self._last),
            )

    def _expired(self, edge: EdgeSummary, gone: errors.ObjectNotFoundError) -> EdgeProof:
        if not gone.key.startswith(keys.PAYLOADS):
            raise gone
        prunes = self._chain.prunes
        if not prunes.is_pruned(edge):
            prunes.refresh()  # it may have been pruned since the verification began
        pruned = prunes.is_pruned(edge)
        return _proof(edge, None, proven=False, expired=gone.key, pruned=pruned)


def _proof(edge: EdgeSummary, fetched: Fetched | None, **found: Any) -> EdgeProof:  # noqa: ANN401
    parts = fetched.parts if fetched else ()
    return EdgeProof(
        kind=edge.kind,
        base=edge.base,
        key=edge.record or keys.manifest_key(edge.version),
        nbytes=fetched.nbytes if fetched else 0,
        parts=len(parts),
        frames=sum(len(row.stored) for part in parts for row in part.directory.streams),
        nnz=sum(part.nnz for part in parts),
        refetched=fetched.refetched if fetched else (),
        **found,
    )
