from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from deltachain.chain.plan import MOST_VERSIONS, KnownEdges, Replay, anchor_due
from deltachain.format.documents import (
    Edge,
    EdgeSummary,
    Manifest,
    ObjectRef,
    seal,
    summarise,
)
from deltachain.format.keys import PayloadKind, edge_key, payload_key

DIGEST = "0" * 64

SHARE = 0.5
"""Anchors and manifests over deltas, in bytes, that no chain may exceed."""

BITS_A_CHANGE = {0.01: 10.0, 0.001: 13.6}
"""By density; the encoding `step`, measured."""

OVERHEAD = 1200
"""Bytes of header and directory of a delta with some tens of tensors."""


@dataclass(frozen=True)
class Run:
    """A simulated chain in bytes, without version 0, and the most versions replayed."""

    anchors: int
    deltas: int
    manifests: int
    replayed: int


def edge_of(kind: PayloadKind, version: int, nbytes: int, parts: int) -> Edge:
    refs = tuple(
        ObjectRef(
            key=payload_key(kind, version, 0, "a" * 32, part),
            nbytes=nbytes // parts,
            blake3=DIGEST,
            directory=DIGEST,
        )
        for part in range(parts)
    )
    base = version - 1 if kind == "delta" else None
    return Edge(kind=kind, base=base, encodings=("step",), parts=refs)


def simulate(params: float, density: float, versions: int) -> Run:
    """Publish versions of one size, with the manifests that the publisher would write."""
    delta = int(params * density * BITS_A_CHANGE[density] / 8) + OVERHEAD
    anchor, parts = int(0.67 * 2 * params), max(1, round(delta / 200e6))
    known, added, replay = KnownEdges(), list[EdgeSummary](), Replay()
    spent, anchors, replayed = Replay(), 0, 0
    for version in range(versions + 1):
        edge = edge_of("delta", version, delta, parts)
        if version == 0:
            edge = edge_of("anchor", 0, anchor, 16)
        recent, window_from = known.listed(version, added)
        manifest = Manifest(
            chain="0" * 32,
            version=version,
            epoch=0,
            commit_id="a" * 32,
            parent=DIGEST,
            step=version,
            time=1.7e9 + version / 7,
            base_state="0" * 32,
            state="0" * 32,
            nnz=int(params * density),
            numel=int(params),
            edge=edge,
            recent=recent,
            window_from=window_from,
        )
        known, added = known.after(manifest, added), []
        if version == 0:
            continue
        own = Replay(versions=1, deltas=edge.nbytes, manifests=len(seal(manifest)))
        spent, replay = spent + own, replay + own
        replayed = max(replayed, replay.versions)
        if anchor_due(replay, anchor):
            later = edge_of("anchor", version, anchor, 16)
            key = edge_key(version, "anchor", None)
            added = [summarise(version, later, manifest.state, record=key, digest=DIGEST)]
            anchors, replay = anchors + anchor, Replay()
    return Run(anchors, spent.deltas, spent.manifests, replayed)


@pytest.mark.parametrize(
    ("params", "versions"), [(2e6, 10_000), (0.6e9, 3000), (8e9, 3000), (70e9, 3000)]
)
@pytest.mark.parametrize("density", [0.01, 0.001])
def test_anchors_and_manifests_cost_at_most_half_of_the_deltas(
    params: float, density: float, versions: int
) -> None:
    run = simulate(params, density, versions)
    assert run.anchors + run.manifests <= SHARE * run.deltas
    assert run.replayed <= MOST_VERSIONS


@pytest.mark.parametrize(
    ("replay", "anchor", "settings", "due"),
    [
        # deltas outweigh it
        (Replay(versions=9, deltas=1999), 1000, {}, False),
        (Replay(versions=9, deltas=2000), 1000, {}, True),
        (Replay(versions=9, deltas=2000, manifests=1), 1000, {}, False),
        (Replay(versions=9, deltas=2000), 1000, {"factor": 4}, False),
        # nothing else leads to the head
        (None, 1000, {}, True),
        (None, 1000, {"every": 100}, True),
        # the version of the last one
        (Replay(), 0, {}, False),
        (Replay(), 0, {"factor": 0.001}, False),
        (Replay(), 0, {"every": 1}, False),
        # a set cadence replaces costs
        (Replay(versions=4, deltas=1 << 40), 1000, {"every": 5}, False),
        (Replay(versions=5), 1000, {"every": 5}, True),
        # a factor of one asks for one of every version
        (Replay(versions=1), 1 << 40, {"factor": 1}, True),
        # many versions without changes
        (Replay(versions=MOST_VERSIONS - 1, manifests=1 << 30), 1000, {}, False),
        (Replay(versions=MOST_VERSIONS, manifests=1 << 30), 1000, {}, True),
    ],
)
def test_when_an_anchor_is_due(
    replay: Replay | None, anchor: int, settings: dict[str, Any], due: bool
) -> None:
    assert anchor_due(replay, anchor, **settings) is due
