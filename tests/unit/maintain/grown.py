"""Small chains of many versions, made without a trainer, and what they hold."""

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from deltachain.chain.chain import Chain, Committed
from deltachain.chain.manifests import read_hint
from deltachain.chain.plan import KnownEdges, window_from
from deltachain.chain.trust import Trust
from deltachain.chain.upload import EdgeKeys, EdgeUpload
from deltachain.codec import ENCODINGS, Change
from deltachain.delta import ABSOLUTE, STEP, OldBits, TensorDelta
from deltachain.format.documents import Edge, EdgeSummary, Manifest, Table
from deltachain.format.keys import PAYLOADS, digest_key
from deltachain.kernels import host
from deltachain.kernels.protocol import digest_change
from deltachain.maintain import KeepRule, Maintainer, Pruner
from deltachain.maintain.added_edges import add_anchor
from deltachain.maintain.survey import Survey
from deltachain.store import MemoryStore, ObjectInfo, Store
from deltachain.types import Bits, StateDigest, TensorSpec, Version
from tests.support.backup import objects_of, put_back

SPECS = (
    TensorSpec("h.0.a", "BF16", (24, 16)),
    TensorSpec("h.0.b", "F32", (40,)),
    TensorSpec("h.0.c", "U8", (64,)),
)


@dataclass
class Grown:
    """A chain, and the bits of each of its versions."""

    store: Store
    encodings: Sequence[str] = ("step",)
    seed: int = 0
    bits: list[dict[str, Bits]] = field(default_factory=list)
    time: float = 0.0
    parent: Committed | None = None
    added: tuple[EdgeSummary, ...] = ()
    trust: Trust | None = None

    def __post_init__(self) -> None:
        table = Table(tensors=tuple((s.name, s.dtype, s.shape) for s in SPECS))
        self.chain = Chain.create(
            self.store, table, chain_id="c" * 32, time=0.0, assets={}, trust=self.trust
        )
        self.random = np.random.default_rng(self.seed)

    @property
    def head(self) -> Version:
        return len(self.bits) - 1

    def state(self, version: Version) -> StateDigest:
        bits = self.bits[version]
        return sum((host.digest(digest_key(s), bits[s.name]) for s in SPECS), StateDigest())

    def grow(self, count: int, density: float = 0.02) -> None:
        for _ in range(count):
            self.commit(density)

    def anchor(self) -> None:
        """Commit a version whose edge is an anchor, as a publisher does that was restarted."""
        self.commit(whole=True)

    def commit(self, density: float = 0.02, *, whole: bool = False) -> Committed:
        if not self.bits or whole:
            new = {s.name: self._random(s, s.numel) for s in SPECS}
            changes = [
                Change(TensorDelta.dense(s, new[s.name]), host.digest(digest_key(s), new[s.name]))
                for s in SPECS
            ]
            kind = "anchor"
        else:
            new = {name: bits.copy() for name, bits in self.bits[-1].items()}
            changes = [c for s in SPECS if (c := self._change(s, new[s.name], density))]
            kind = "delta"
        version = self.head + 1
        keys = EdgeKeys(kind=kind, version=version, epoch=0, commit_id=uuid.uuid4().hex)  # type: ignore[arg-type]
        with EdgeUpload(self.store, keys, raw=False, part_nbytes=1 << 20) as upload:
            for change in changes:
                upload.add(change)
            edge = upload.finish()
        self.bits.append(new)
        return self._commit(edge)

    def _random(self, spec: TensorSpec, count: int) -> Bits:
        return self.random.integers(0, 256**spec.itemsize, count).astype(spec.bits_dtype)

    def _change(self, spec: TensorSpec, bits: Bits, density: float) -> Change | None:
        """Change some bits in place; return the change in one of the encodings."""
        old = bits.copy()
        encoding = str(self.random.choice(self.encodings))
        if encoding == "dense":
            bits[:] = self._random(spec, spec.numel)
            return Change(TensorDelta.dense(spec, bits), host.digest(digest_key(spec), bits))
        places = np.flatnonzero(self.random.random(spec.numel) < density)
        steps = self.random.integers(1, 3, places.size).astype(spec.bits_dtype)
        bits[places] = bits[places] + steps
        if not places.size:
            return None
        chosen = ENCODINGS.get(encoding)
        values = bits[places] if chosen.absolute else bits[places] - old[places]
        delta = TensorDelta(
            spec=spec, indices=places, values=values, absolute=ABSOLUTE if chosen.absolute else STEP
        )
        digest = digest_change(spec, places, old[places], bits[places])
        before = (lambda: OldBits(old)) if chosen.needs_old else None
        return Change(delta, digest, encoding=chosen, old=before)

    def _commit(self, edge: Edge) -> Committed:
        parent, version = self.parent, self.head
        manifest = Manifest(
            chain=self.chain.identity.chain,
            version=version,
            epoch=0,
            commit_id=uuid.uuid4().hex,
            parent=parent.digest if parent else "",
            step=10 * version,
            time=float(version),
            base_state=parent.manifest.state if parent else "",
            state=str(self.state(version)),
            nnz=1,
            numel=sum(spec.numel for spec in SPECS),
            edge=edge,
            recent=KnownEdges().after(parent.manifest, self.added).edges if parent else (),
            window_from=window_from(version),
        )
        self.parent, self.added = self.chain.commit(manifest), ()
        if version % 8 == 0:  # as a publisher does: it lists the anchors of others from now on
            self.added = read_hint(self.store).anchors
            self.chain.write_head(version, self.added)
        return self.parent


class Clock(MemoryStore):
    """A store whose clock is set by the test."""

    now = 1_000_000.0

    def find(self, key: str) -> ObjectInfo | None:
        info = super().find(key)
        return replace(info, modified=self.now) if info else None


def pruner_of(grown: Grown, *, tagged: Iterable[Version] = (), **rule: Any) -> Pruner:
    survey = Survey(Chain.open(grown.store))
    return Pruner(survey, KeepRule(**rule), grace_s=3600, tagged=lambda _: tagged)


def payloads(store: Store) -> dict[str, int]:
    """Sizes of the objects that hold weights, by key."""
    return {info.key: info.nbytes for prefix in PAYLOADS for info in store.list(prefix)}


class Backup:
    """What a store and its trainer hold, to go on from there again."""

    def __init__(self, grown: Grown) -> None:
        self.objects = objects_of(grown.store)
        self.random, self.parent = grown.random.bit_generator.state, grown.parent
        self.bits, self.added = list(grown.bits), grown.added

    def restore(self, grown: Grown) -> None:
        put_back(grown.store, self.objects)
        grown.random.bit_generator.state, grown.parent = self.random, self.parent
        grown.bits, grown.added = list(self.bits), self.added


def sixty(*anchors: Version) -> Grown:
    """60 versions, with anchors of some of them."""
    return _again(anchors, False)


def grow_sixty() -> Grown:
    """60 versions, with anchors of versions 24 and 40, and skips."""
    return _again((24, 40), True)


def _again(anchors: tuple[Version, ...], has_skips: bool) -> Grown:
    made = Grown(Clock())
    _grown(anchors, has_skips).restore(made)
    return made


@cache
def _grown(anchors: tuple[Version, ...], has_skips: bool) -> Backup:
    made = anchored(Grown(Clock()), *anchors)
    if has_skips:
        Maintainer(made.chain, None).round()
    return Backup(made)


def anchored(grown: Grown, *versions: Version) -> Grown:
    grown.grow(60)
    for version in versions:
        add_anchor(grown.chain, grown.chain.read(version))
    return grown


def finish(pruner: Pruner) -> None:
    pruner.run()
    Clock.now += 3601
    pruner.run()
