from typing import Any

import numpy as np
import pytest
from typing_extensions import override

from deltachain.chain.chain import Chain, Committed, is_reachable, plan_present
from deltachain.chain.plan import Plan
from deltachain.errors import AlreadyExistsError, BrokenChainError, ChainError, ConfigError
from deltachain.format.documents import EdgeKind, EdgeSummary, PrunedRange, PruneRecord, seal
from deltachain.format.keys import payload_key, prune_key
from deltachain.maintain import KeepRule, Maintainer, PrunePlan, Pruner
from deltachain.maintain.added_edges import add_anchor
from deltachain.maintain.pruner import ranges
from deltachain.maintain.survey import Survey
from deltachain.publish.revert import revert
from deltachain.types import Version
from deltachain.verify import verify
from tests.support.backup import objects_of
from tests.support.fetch import fetch
from tests.support.values import present
from tests.unit.maintain.grown import (
    SPECS,
    Backup,
    Clock,
    Grown,
    anchored,
    finish,
    grow_sixty,
    payloads,
    pruner_of,
    sixty,
)
from tests.unit.manifest_chains import SingleWriterStore


@pytest.mark.full
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("tagged", "deleted"), [((), False), ((13,), False), ((), True), ((7, 13, 29), True)]
)
def test_verify_rebuilds_what_readers_can_reach_from_any_version_on(
    grown: Grown, tagged: tuple[Version, ...], deleted: bool, every: int
) -> None:
    """A pruned first version, or a kept delta behind a skip's base, hides nothing after it."""
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
            assert expired or first


def test_verify_of_pruned_versions_alone_says_so(grown: Grown) -> None:
    finish(pruner_of(grown, last=20))
    chain = Chain.open(grown.store)
    last = next(version for version in range(60) if not is_reachable(chain, version))
    with pytest.raises(BrokenChainError, match="were pruned"):
        list(verify(Chain.open(grown.store), first=last, last=last))


@pytest.mark.full
@pytest.mark.parametrize("at", [0, 3, 12])
def test_what_is_pruned_while_verify_runs_counts_as_pruned(grown: Grown, at: Version) -> None:
    gone = []
    for proof in verify(Chain.open(grown.store)):
        if proof.version == at:
            finish(pruner_of(grown, last=20))
        gone += [edge for edge in proof.edges if edge.expired]
    assert gone
    assert all(edge.pruned for edge in gone)


@pytest.fixture
def grown() -> Grown:
    return grow_sixty()


def check_bits(grown: Grown, version: Version, held: Version | None = None) -> None:
    """A reader reaches a version from nothing, or from one that it holds."""
    chain = Chain.open(grown.store)
    plan = chain.plan(held, chain.read(version))
    fetched = fetch(chain, plan)
    if held is None:
        for spec in SPECS:
            assert np.array_equal(fetched.read(spec.name).values, grown.bits[version][spec.name])


def test_nothing_is_deleted_before_the_grace_is_over_by_the_clock_of_the_store(
    grown: Grown,
) -> None:
    store, before = grown.store, payloads(grown.store)
    pruner = pruner_of(grown, last=17)
    plan = present(pruner.run())
    assert plan.retired
    assert not plan.due
    assert payloads(store) == before
    Clock.now += 3599
    assert not run(pruner).due
    assert payloads(store) == before
    Clock.now += 2
    expected = present(pruner.plan())
    done = run(pruner)
    assert payloads(store).keys() == before.keys() - {info.key for info in expected.due}
    freed = sum(before.values()) - sum(payloads(store).values())
    assert freed == expected.nbytes == done.nbytes > 0
    again = run(pruner)
    assert not again.due
    assert not again.retired


def run(pruner: Pruner) -> PrunePlan:
    return present(pruner.run())


def test_what_is_kept_is_reached_and_what_is_not_is_gone(grown: Grown) -> None:
    finish(pruner_of(grown, last=20, every=25, tagged=[7, 31]))
    for version in (0, 7, 25, 31, *range(40, 60)):
        check_bits(grown, version)
    check_bits(grown, 59, held=41)
    with pytest.raises(BrokenChainError):
        check_bits(grown, 12)
    assert all(proof.rebuilt for proof in verify(Chain.open(grown.store), first=40))
    proofs = verify(Chain.open(grown.store))
    gone = [edge for proof in proofs for edge in proof.edges if edge.expired]
    assert gone
    assert all(edge.pruned for edge in gone)


@pytest.mark.full
def test_small_skips_lead_on_where_large_ones_are_missing_and_deltas_are_gone() -> None:
    made = Grown(Clock())
    made.grow(80)
    Maintainer(made.chain, None).round()
    skips = [info.key for info in made.store.list("edges/") if "skip-" in info.key]
    assert f"edges/{64:020d}/skip-{0:020d}.json" not in skips  # larger than an anchor
    finish(pruner_of(made, last=17))
    for version in range(63, 80):
        check_bits(made, version)


@pytest.mark.full
def test_time_keeps_versions(grown: Grown) -> None:
    finish(pruner_of(grown, last=1, within_s=30.0))  # one version a second
    for version in range(29, 60):
        check_bits(grown, version)
    with pytest.raises(BrokenChainError):
        check_bits(grown, 20)


def test_planners_leave_out_what_is_retired_at_once(grown: Grown) -> None:
    target = grown.chain.read(30)
    assert Chain.open(grown.store).plan(25, target).edges[0].base == 25
    pruner_of(grown, last=17).run()
    with pytest.raises(BrokenChainError):
        Chain.open(grown.store).plan(25, target)
    assert payloads(grown.store)


def test_a_tag_set_after_the_record_takes_its_way_back(grown: Grown) -> None:
    pruner_of(grown, last=17).run()
    finish(pruner_of(grown, last=17, tagged=[21]))
    check_bits(grown, 21)


def test_a_tag_set_between_decision_and_deletion_keeps_its_objects(
    grown: Grown, caplog: pytest.LogCaptureFixture
) -> None:
    """What is due is decided twice: the tag is seen only the second time."""
    looks: list[int] = []

    def tagged(_: Chain) -> list[Version]:
        looks.append(len(looks))
        return [12] if len(looks) > 2 else []

    pruner = Pruner(Survey(Chain.open(grown.store)), KeepRule(last=17), grace_s=3600, tagged=tagged)
    run(pruner)
    Clock.now += 3601
    before = payloads(grown.store)
    done = run(pruner)
    assert len(looks) == 3
    assert "are kept, because they are needed again" in caplog.text
    freed = sum(before.values()) - sum(payloads(grown.store).values())
    assert done.nbytes == freed > 0
    run(pruner)  # never into plans again: who was stopped before a deletion goes on with it
    chain = Chain.open(grown.store)
    with pytest.raises(BrokenChainError):
        chain.plan(None, chain.read(12))
    assert is_whole(chain, 12)


def is_whole(chain: Chain, version: Version) -> bool:
    """Whether a version is there, over pruned edges too."""
    return bool(plan_present(chain, None, chain.read(version), pruned=True).edges)


def test_nothing_is_added_to_a_pruned_version(grown: Grown) -> None:
    pruner_of(grown, last=17, tagged=[24]).run()
    check_bits(grown, 24)  # over a skip, without the delta from version 23
    before = payloads(grown.store)
    with pytest.raises(ChainError, match="version 24 is pruned") as caught:
        add_anchor(grown.chain, grown.chain.read(24))
    assert caught.value.hint
    assert payloads(grown.store) == before
    assert add_anchor(grown.chain, grown.chain.read(59)).kind == "anchor"


def test_a_revert_reaches_what_is_pruned_until_it_is_deleted(grown: Grown) -> None:
    pruner = pruner_of(grown, last=17)
    pruner.run()
    goal, gone = grown.chain.read(21), grown.chain.read(22)
    done = revert(Chain.open(grown.store), goal)
    assert getattr(done.committed, "state", None) == goal.state
    Clock.now += 3601
    pruner.run()
    with pytest.raises(BrokenChainError):
        revert(Chain.open(grown.store), gone)


def test_orphans_go_and_parts_on_their_way_stay(grown: Grown) -> None:
    store = grown.store
    digits = "f" * 32
    old = f"deltas/{9:020d}-00000000-{digits}/00000.safetensors"
    late = f"anchors/{9:020d}-00000000-{digits}/00000.safetensors"
    lost = f"anchors/{24:020d}-00000000-{digits}/00000.safetensors"
    skip = f"skips/{40:020d}-00000000-{digits}/00000.safetensors"
    coming = f"deltas/{60:020d}-00000000-{digits}/00000.safetensors"
    odd = f"skips/{45:020d}-00000000-{digits}/00000.safetensors"  # another program's: any span
    for key in (old, late, lost, skip, coming, odd):
        store.put(key, b"x" * 10)
    plan = present(pruner_of(grown, last=1000).run())
    assert {info.key for info in plan.orphans} == {old, lost, skip}
    assert {late, coming, odd} <= payloads(store).keys()
    assert all(proof.rebuilt for proof in verify(Chain.open(store)))


def test_lost_objects_are_found_before_anything_goes(grown: Grown) -> None:
    """The way to the head over the newest anchor is broken: the older one stays."""

    def lose_anchor(version: Version) -> None:
        key = next(k for k in payloads(grown.store) if k.startswith(f"anchors/{version:020d}"))
        grown.store.delete(key)

    lose_anchor(40)
    finish(pruner_of(grown, last=17))
    assert is_reachable(Chain.open(grown.store), 59)
    lose_anchor(24)
    if any(key.startswith(f"anchors/{0:020d}") for key in payloads(grown.store)):
        lose_anchor(0)
    before = payloads(grown.store)
    with pytest.raises(BrokenChainError):
        pruner_of(grown, last=17).run()
    assert payloads(grown.store) == before


def grow_maintained(last: int, tag: Version, versions: int) -> Grown:
    """A chain that is maintained and pruned as it grows, with one tag set on the way."""
    made = Grown(Clock())
    tagged: list[Version] = []
    made.grow(1)
    survey = Survey(Chain.open(made.store))
    pruner = Pruner(survey, KeepRule(last=last), grace_s=5, tagged=lambda _: tagged)
    maintainer = Maintainer(survey.chain, pruner, anchor_every=64)
    for version in range(1, versions):
        made.grow(1, density=0.01)
        if version == tag:
            tagged.append(tag)
        if version % 10 == 0:
            Clock.now += 10
            done = present(maintainer.round())
            assert not done.failed
    return made


SLOW_TAGS = [pytest.param(tag, marks=pytest.mark.slow) for tag in (66, 130)]


@pytest.mark.full
@pytest.mark.parametrize("tag", [137, *SLOW_TAGS])
def test_readers_find_their_way_to_what_was_kept(tag: Version) -> None:
    """A reader knows the anchors that manifests list, and no others."""
    grown = grow_maintained(40, tag, 260)
    head = grown.head
    for version in (tag, *range(head - 39, head + 1)):
        check_bits(grown, version)


@pytest.mark.full
def test_a_rule_that_asks_for_what_is_gone_keeps_the_rest(
    grown: Grown, caplog: pytest.LogCaptureFixture
) -> None:
    finish(pruner_of(grown, last=17))
    finish(pruner_of(grown, last=40, every=10))
    assert "cannot be reached any more" in caplog.text
    for version in range(43, 60):
        check_bits(grown, version)


def test_records_that_vanish_are_forgotten(grown: Grown) -> None:
    pruner = pruner_of(grown, last=17)
    pruner.plan()
    for version in (24, 40):
        grown.store.delete(f"edges/{version:020d}/anchor-nothing.json")
    finish(pruner)
    assert is_reachable(Chain.open(grown.store), 59)


def test_a_dry_run_writes_nothing(grown: Grown) -> None:
    before = objects_of(grown.store)
    plan = present(pruner_of(grown, last=17).plan(dry=True))
    assert plan.retired
    assert objects_of(grown.store) == before


def test_the_loser_of_a_race_reads_and_decides_again(grown: Grown) -> None:
    one, other = pruner_of(grown, last=17), pruner_of(grown, last=30)
    late, early = present(one.plan()), present(other.plan())
    assert other.record(early) is not None
    one._newest = lambda: None  # type: ignore[method-assign]  # as if it had looked before
    with pytest.raises(AlreadyExistsError):
        one.record(late)
    del one._newest
    one.run()
    newest = present(Chain.open(grown.store).prunes.newest())
    assert newest.number == 1


def test_two_maintainers_with_different_rules_are_told_so(
    grown: Grown, caplog: pytest.LogCaptureFixture
) -> None:
    """Each takes back what the other one retires, so that nothing is ever deleted."""
    one, other = pruner_of(grown, last=1024), pruner_of(grown, last=17)
    run(one)
    retired = len(run(other).retired)
    run(one)
    assert f"{retired} edges that maintainer" in caplog.text
    assert "give all maintainers of a chain the same rule" in caplog.text
    caplog.clear()
    run(one)
    assert not caplog.text


def test_a_second_maintainer_is_found_where_the_store_cannot_decide() -> None:
    grown = anchored(Grown(SingleWriterStore()), 24, 40)
    Maintainer(grown.chain, None).round()
    one, other = pruner_of(grown, last=30), pruner_of(grown, last=17)
    one.run()
    other.run()
    with pytest.raises(ChainError, match="another maintainer"):
        one.run()


@pytest.mark.full
def test_numbers_of_records_are_found_by_few_looks(grown: Grown) -> None:
    pruner = pruner_of(grown, last=17)
    for number in range(40):
        pruner.rule = KeepRule(last=17 if number % 2 else 30)  # each takes the other's back
        pruner.run()
    newest = present(Chain.open(grown.store).prunes.newest())
    assert newest.number == 39
    assert grown.store.find(prune_key(newest.number + 1)) is None


def edge(kind: EdgeKind, version: Version, base: Version | None) -> EdgeSummary:
    return EdgeSummary(
        version=version, kind=kind, base=base, nbytes=1, parts=1, encodings=(), state=""
    )


def test_ranges_cover_exactly_the_pruned_edges() -> None:
    random = np.random.default_rng(0)
    edges = [edge("delta", v, v - 1) for v in range(1, 80)]
    edges += [edge("skip", v, v - 8) for v in range(8, 80, 8)]
    edges += [edge("anchor", v, None) for v in range(0, 80, 11)]
    for _ in range(50):
        chosen = [one for one in edges if random.random() < 0.6]
        after = {one: float(random.integers(0, 3)) for one in chosen}
        rows = ranges(edges, after, now=1.5)
        record = PruneRecord(chain="c", number=0, head=100, maintainer="m", time=0.0, pruned=rows)
        for one in edges:
            covering = [row for row in rows if row.covers(one.kind, one.base, one.version)]
            found = record.range_of(one.kind, one.base, one.version)
            assert [found] * bool(found) == covering
            assert len(covering) == (one in after)
            assert not covering or covering[0].after >= after[one]
            assert not covering or (covering[0].after <= 1.5) == (after[one] <= 1.5)


@pytest.mark.parametrize("wrong", [{"last": 0}, {"every": 0}, {"within_s": -1.0}])
def test_a_rule_that_keeps_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        KeepRule(**wrong)


def test_a_store_that_was_restored_keeps_what_a_trainer_publishes_again() -> None:
    """Its versions have the same bits and summaries as before, and parts of other keys."""
    grown = Grown(Clock())
    grown.grow(30)
    backup = Backup(grown)
    grown.grow(10)
    key = payload_key("delta", 35, 0, "0" * 32, 0)
    grown.store.put(key, b"orphan")  # of a trainer that was killed: all parts are looked at
    pruner = pruner_of(grown, last=20)
    assert {info.key for info in pruner.run().orphans} == {key}  # type: ignore[union-attr]
    backup.restore(grown)
    grown.grow(10)
    before = payloads(grown.store)
    plan = present(pruner.run())
    assert not plan.orphans
    assert payloads(grown.store) == before
    check_bits(grown, 39)


def test_prune_records_go_on_from_those_of_a_store_that_was_restored(grown: Grown) -> None:
    """A gap between their numbers would hide the newest one from all others."""
    pruner = pruner_of(grown, last=17)
    finish(pruner)
    backup = Backup(grown)
    for _ in range(3):
        grown.grow(16)
        Clock.now += 3601
        pruner.run()
    backup.restore(grown)
    for _ in range(2):
        grown.grow(16)
        Clock.now += 3601
        pruner.run()
        known, chain = pruner.survey.chain.prunes.newest(), Chain.open(grown.store)
        assert chain.prunes.newest() == known is not None


def test_a_record_is_not_written_after_another_that_its_plan_does_not_know(grown: Grown) -> None:
    """It would take back what the other retired, or retire again what the other kept."""
    pruner = pruner_of(grown, last=17)
    pruner.run()
    grown.grow(16)
    plan = present(pruner.plan())
    pruner_of(grown, last=46).run()
    with pytest.raises(AlreadyExistsError):
        pruner.record(plan)


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


@pytest.mark.parametrize("version", [16, 40])
def test_an_anchor_that_would_count_as_pruned_is_refused(version: int) -> None:
    """Whether it is recorded already or not; deltas between the pruned ones are there."""
    grown = sixty(16, 48)
    write_record(grown, PrunedRange(kind="anchor", span=0, first=16, last=48, after=1.0))
    before = payloads(grown.store)
    with pytest.raises(ChainError, match=f"the anchor of version {version} is pruned") as caught:
        add_anchor(grown.chain, grown.chain.read(version))
    assert caught.value.hint
    assert payloads(grown.store) == before
    assert add_anchor(grown.chain, grown.chain.read(52)).version == 52


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
    grown = sixty(40, 48)
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
    grown = sixty(40, 48)
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
