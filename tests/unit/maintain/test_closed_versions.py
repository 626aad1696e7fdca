"""Versions and edges that a prune record closes: nothing is added there that would be lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from typing_extensions import override

from deltachain.chain.chain import Chain, Committed
from deltachain.chain.plan import Plan
from deltachain.errors import ChainError
from deltachain.format.documents import EdgeSummary, PrunedRange, PruneRecord, seal
from deltachain.format.keys import prune_key
from deltachain.maintain import Maintainer, Pruner
from deltachain.maintain.added_edges import add_anchor
from deltachain.store import open_store
from tests.support.values import present
from tests.unit.cli.support import invoke
from tests.unit.maintain.grown import Grown
from tests.unit.maintain.pruning import Backup, Clock, pruner_of
from tests.unit.maintain.test_prune import payloads


def write_record(grown: Grown, *rows: PrunedRange) -> None:
    record = PruneRecord(
        chain=grown.chain.identity.chain,
        number=0,
        head=grown.head,
        maintainer="m",
        time=1.0,
        pruned=rows,
    )
    grown.store.put(prune_key(0), seal(record))


def between_anchors(grown: Grown) -> None:
    """Anchors of versions 16 and 48 are pruned; deltas between them are not."""
    grown.grow(60)
    for version in (16, 48):
        add_anchor(grown.chain, grown.chain.read(version))
    write_record(grown, PrunedRange(kind="anchor", span=0, first=16, last=48, after=1.0))


@pytest.mark.parametrize("version", [16, 40])
def test_an_anchor_that_would_count_as_pruned_is_refused(version: int) -> None:
    """Whether it is recorded already or not."""
    grown = Grown(Clock())
    between_anchors(grown)
    before = payloads(grown.store)
    with pytest.raises(ChainError, match=f"the anchor of version {version} is pruned") as caught:
        add_anchor(grown.chain, grown.chain.read(version))
    assert caught.value.hint
    assert payloads(grown.store) == before
    assert add_anchor(grown.chain, grown.chain.read(52)).version == 52


def test_the_command_says_so(tmp_path: Path) -> None:
    grown = Grown(open_store(str(tmp_path), writer=True))
    between_anchors(grown)
    done = invoke("anchor", tmp_path, "--version", "40")
    assert done.code != 0
    assert "the anchor of version 40 is pruned" in done.stderr
    assert invoke("anchor", tmp_path, "--version", "52").code == 0


def test_a_skip_that_would_count_as_pruned_is_not_made() -> None:
    grown = Grown(Clock())
    grown.grow(40)
    write_record(grown, PrunedRange(kind="skip", span=8, first=16, last=32, after=1.0))
    done = present(Maintainer(Chain.open(grown.store), None).round())
    assert not done.failed
    assert [skip.version for skip in done.skips] == [8]


class Raced(Maintainer):
    """A maintainer beside another one, which prunes while this one folds a skip."""

    other: Pruner | None = None

    @override
    def make_skip(self, start: Committed, plan: Plan, target: Committed) -> EdgeSummary:
        made = super().make_skip(start, plan, target)
        if self.other is not None and target.version == 56:
            self.other.run()
        return made


def test_a_version_that_is_pruned_meanwhile_ends_no_round() -> None:
    """Another maintainer closes the next versions while this one makes the skip before."""
    grown = Grown(Clock())
    grown.grow(60)
    for version in (40, 48):
        add_anchor(grown.chain, grown.chain.read(version))
    maintainer = Raced(Chain.open(grown.store), None)
    maintainer.hint(grown.chain.read(grown.head))
    grown.grow(40)
    maintainer.other = pruner_of(grown, last=17)
    done = present(maintainer.round())
    assert not done.failed
    assert grown.chain.prunes.newest() is not None
    assert {skip.version for skip in done.skips} == {96, 88, 80, 72, 64, 56}


def test_a_store_that_was_restored_is_not_closed_by_a_record_that_it_lost() -> None:
    """Also to a maintainer that prunes nothing."""
    grown = Grown(Clock())
    grown.grow(60)
    for version in (40, 48):
        add_anchor(grown.chain, grown.chain.read(version))
    maintainer = Maintainer(Chain.open(grown.store), None)
    maintainer.hint(grown.chain.read(grown.head))
    grown.grow(30)
    backup = Backup(grown)
    pruner_of(grown, last=17).run()
    maintainer.chain.prunes.refresh()
    assert maintainer.chain.prunes.is_closed(16)
    backup.restore(grown)
    done = present(maintainer.round())
    assert {skip.version for skip in done.skips} == set(range(8, 90, 8))
