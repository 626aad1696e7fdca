from __future__ import annotations

import logging
from dataclasses import dataclass

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

logger = logging.getLogger(__name__)

DIGEST = "0" * 64

SHARE = 0.5
"""Anchors and manifests over deltas, in bytes, that no chain may exceed."""

BITS_A_CHANGE = {0.01: 10.0, 0.001: 13.6}
"""By density; the encoding `step`, measured."""

OVERHEAD = 1200
"""Bytes of header and directory of a delta with some tens of tensors."""


@dataclass(frozen=True)
class Run:
    """A simulated chain, in bytes; without version 0.

    Attributes:
        newcomer: The most that a newcomer had to fetch, in anchors; documents count.
        replayed: The most versions that a newcomer had to replay.
    """

    anchors: int
    deltas: int
    manifests: int
    newcomer: float
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
    spent, anchors, newcomer, replayed = Replay(), 0, 0.0, 0
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
        newcomer = max(newcomer, 1 + (replay.deltas + replay.manifests) / anchor)
        if anchor_due(replay, anchor):
            later = edge_of("anchor", version, anchor, 16)
            key = edge_key(version, "anchor", None)
            added = [summarise(version, later, manifest.state, record=key, digest=DIGEST)]
            anchors, replay = anchors + anchor, Replay()
    return Run(anchors, spent.deltas, spent.manifests, newcomer, replayed)


@pytest.mark.parametrize(
    ("params", "density", "versions"),
    [
        (2e6, 0.01, 10_000),
        (2e6, 0.001, 10_000),
        (0.6e9, 0.01, 3000),
        (0.6e9, 0.001, 3000),
        (8e9, 0.01, 3000),
        (8e9, 0.001, 3000),
        (70e9, 0.01, 3000),
        (70e9, 0.001, 3000),
    ],
)
def test_anchors_and_manifests_cost_at_most_half_of_the_deltas(
    params: float, density: float, versions: int
) -> None:
    run = simulate(params, density, versions)
    anchors, manifests = run.anchors / run.deltas, run.manifests / run.deltas
    logger.info(  # shown by pytest --log-cli-level=info
        "%.0f M at %.1f %%, %d versions: anchors %.3f and manifests %.4f of %.1f MB of deltas; a "
        "newcomer fetches up to %.2f anchors, and %d versions without skips",
        params / 1e6,
        100 * density,
        versions,
        anchors,
        manifests,
        run.deltas / 1e6,
        run.newcomer,
        run.replayed,
    )
    assert anchors + manifests <= SHARE
    assert run.replayed <= MOST_VERSIONS


def test_an_anchor_is_due_when_deltas_outweigh_it() -> None:
    assert not anchor_due(Replay(versions=9, deltas=1999), 1000)
    assert anchor_due(Replay(versions=9, deltas=2000), 1000)
    assert not anchor_due(Replay(versions=9, deltas=2000, manifests=1), 1000)
    assert not anchor_due(Replay(versions=9, deltas=2000), 1000, factor=4)


def test_an_anchor_is_due_where_nothing_else_leads_to_the_head() -> None:
    assert anchor_due(None, 1000)
    assert anchor_due(None, 1000, every=100)


def test_no_anchor_is_due_at_the_version_of_the_last_one() -> None:
    assert not anchor_due(Replay(), 0)
    assert not anchor_due(Replay(), 0, factor=0.001)
    assert not anchor_due(Replay(), 0, every=1)


def test_a_set_cadence_replaces_costs() -> None:
    assert not anchor_due(Replay(versions=4, deltas=1 << 40), 1000, every=5)
    assert anchor_due(Replay(versions=5), 1000, every=5)


def test_a_factor_of_one_asks_for_an_anchor_of_every_version() -> None:
    assert anchor_due(Replay(versions=1), 1 << 40, factor=1)


def test_many_versions_without_changes_end_in_an_anchor() -> None:
    assert not anchor_due(Replay(versions=MOST_VERSIONS - 1, manifests=1 << 30), 1000)
    assert anchor_due(Replay(versions=MOST_VERSIONS, manifests=1 << 30), 1000)
