"""A version of a synthetic model with a given size on the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from deltachain.chain.chain import Chain
from deltachain.chain.plan import Plan
from deltachain.chain.upload import DENSE_SHARE, EdgeKeys, EdgeUpload
from deltachain.format.documents import Edge, Table
from deltachain.publish.wire_form import dense_change
from deltachain.publish.writer import Writer
from deltachain.store import Store
from deltachain.types import StateDigest, TensorSpec
from tests.bench.chains import bf16_bits

WEIGHTS: Final = 1 << 23

STD: Final = 0.02
"""Standard deviation of the weights, which determines the compression of their exponents; that of
``DENSE_SHARE``."""


@dataclass(frozen=True, slots=True)
class AnchorVersion:
    """Version 0 of a chain: an anchor of one part."""

    chain: Chain
    plan: Plan
    edge: Edge
    part: bytes
    numel: int


def make_version(store: Store, nbytes: int) -> AnchorVersion:
    count = max(1, round(nbytes / DENSE_SHARE / 2 / WEIGHTS))
    numel = min(WEIGHTS, round(nbytes / DENSE_SHARE / 2))
    specs = [TensorSpec(f"layers.{n}.weight", "BF16", (numel,)) for n in range(count)]
    rng = np.random.default_rng(0)
    table = Table(tensors=tuple((s.name, s.dtype, s.shape) for s in specs))
    chain = Chain.create(store, table, chain_id="bench", time=0.0, assets={})
    writer = Writer(chain, numel=numel * count, metadata={}, parent=None)
    keys = EdgeKeys(kind="anchor", version=0, epoch=0, commit_id="bench")
    upload, total = EdgeUpload(store, keys, raw=False, part_nbytes=1 << 40), StateDigest()
    for spec in specs:
        values = rng.standard_normal(spec.numel, dtype=np.float32)
        change = dense_change(spec, bf16_bits(values * np.float32(STD)))
        total += change.digest
        upload.add(change)
    edge = upload.finish()
    draft = writer.draft(state=total, step=None, nnz=numel * count)
    committed = writer.commit(draft, edge)
    ref = edge.parts[0]
    part = bytes(store.read(ref.key, nbytes=ref.nbytes))
    return AnchorVersion(chain, chain.plan(None, committed), edge, part, numel * count)
