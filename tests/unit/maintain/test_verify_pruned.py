"""Verification of chains whose versions were pruned."""

from __future__ import annotations

import pytest

from deltachain.chain.chain import Chain, is_reachable
from deltachain.errors import BrokenChainError
from deltachain.types import Version
from deltachain.verify import verify
from tests.unit.maintain.grown import Grown
from tests.unit.maintain.pruning import finish, grow_sixty, pruner_of


@pytest.fixture
def grown() -> Grown:
    return grow_sixty()


@pytest.mark.parametrize("tagged", [(), (13,), (7, 13, 29)])
def test_verify_rebuilds_every_version_that_readers_can_reach(
    grown: Grown, tagged: tuple[Version, ...]
) -> None:
    """A kept delta behind a skip's base must not hide where the skip leads."""
    finish(pruner_of(grown, last=20, tagged=tagged))
    chain = Chain.open(grown.store)
    rebuilt = {proof.version for proof in verify(Chain.open(grown.store)) if proof.rebuilt}
    assert rebuilt == {version for version in range(60) if is_reachable(chain, version)}
    assert len(rebuilt) < 60


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("deleted", [False, True])
@pytest.mark.parametrize("tagged", [(), (13,)])
def test_verify_may_start_at_any_version(
    grown: Grown, tagged: tuple[Version, ...], deleted: bool, every: int
) -> None:
    """A pruned first version is told, and does not hide the kept ones after it."""
    pruner = pruner_of(grown, last=20, tagged=tagged)
    if deleted:
        finish(pruner)
    else:
        pruner.run()
    chain = Chain.open(grown.store)
    kept = {version for version in range(60) if is_reachable(chain, version)}
    assert len(kept) < 60
    for first in range(0, 60, every):
        proofs = list(verify(Chain.open(grown.store), first=first))
        rebuilt = {proof.version for proof in proofs if proof.rebuilt}
        assert kept & set(range(first, 60)) <= rebuilt
        if deleted:
            assert rebuilt <= kept
            expired = [edge for proof in proofs for edge in proof.edges if edge.expired]
            assert all(edge.pruned for edge in expired)


def test_verify_of_pruned_versions_alone_says_so(grown: Grown) -> None:
    finish(pruner_of(grown, last=20))
    chain = Chain.open(grown.store)
    last = next(version for version in range(60) if not is_reachable(chain, version))
    with pytest.raises(BrokenChainError, match="were pruned"):
        list(verify(Chain.open(grown.store), first=last, last=last))


@pytest.mark.parametrize("at", [0, 3, 12])
def test_what_is_pruned_while_verify_runs_counts_as_pruned(grown: Grown, at: Version) -> None:
    gone = []
    for proof in verify(Chain.open(grown.store)):
        if proof.version == at:
            finish(pruner_of(grown, last=20))
        gone += [edge for edge in proof.edges if edge.expired]
    assert gone
    assert all(edge.pruned for edge in gone)
