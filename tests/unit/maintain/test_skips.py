"""Skips: which there are, what they hold, and how they are found."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltachain.chain.ancestry import SPANS, hops
from deltachain.chain.chain import Chain
from deltachain.chain.fetch import fetch
from deltachain.chain.plan import Plan
from deltachain.errors import DigestMismatchError
from deltachain.format.documents import EdgeSummary
from deltachain.maintain import KeepRule, Maintainer, Pruner
from deltachain.maintain.added_edges import add_anchor
from deltachain.maintain.survey import Survey
from deltachain.store import MemoryStore
from deltachain.types import StateDigest
from deltachain.verify import verify
from tests.support.values import present
from tests.unit.maintain.grown import SPECS, Grown


@given(st.integers(0, 20_000), st.integers(0, 20_000))
def test_hops_lead_from_one_version_to_the_other_in_few_steps(one: int, other: int) -> None:
    first, last = sorted((one, other))
    way = hops(first, last)
    ends = [first, *(hop.version for hop in way)]
    assert ends[-1] == last
    assert [hop.base for hop in way] == ends[:-1]
    assert all(hop.span == 1 or (hop.span in SPANS and not hop.base % hop.span) for hop in way)
    assert len(way) <= 42 + (last - first) // 512


@given(st.integers(0, 3000), st.sampled_from(SPANS))
def test_finer_hops_replace_a_skip(number: int, span: int) -> None:
    (hop,) = hops(number * span, number * span + span)[:1]
    finer = hop.finer()
    assert [part.base for part in finer] == [hop.base, *(part.version for part in finer[:-1])]
    assert finer[-1].version == hop.version
    assert len(finer) == 8


def maintainer_of(chain: Chain) -> Maintainer:
    return Maintainer(chain, None)


def bits_at(grown: Grown, plan: Plan) -> dict[str, np.ndarray]:
    """What a plan makes of the bits that it starts from."""
    fetched = fetch(grown.chain, plan)
    held = {} if plan.held is None else {n: b.copy() for n, b in grown.bits[plan.held].items()}
    for name in fetched.names:
        delta = fetched.read(name, old=partial(held.__getitem__, name))
        if delta.is_dense:
            held[name] = delta.values
        else:
            held[name][delta.indices] = delta.new_bits(held[name][delta.indices])
    return held


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(one[spec.name], other[spec.name]) for spec in SPECS)


@pytest.mark.parametrize(
    "encodings",
    [
        ("step",),
        ("overwrite",),
        ("step", "overwrite"),
        ("step", "dense", "overwrite"),
        ("max",),
        ("max", "step", "overwrite", "dense"),
    ],
)
def test_every_skip_leads_to_the_bits_of_its_version(encodings: tuple[str, ...]) -> None:
    grown = Grown(MemoryStore(), encodings, seed=len(encodings))
    grown.grow(76)
    done = present(maintainer_of(grown.chain).round())
    assert not done.failed
    spans = [edge.version - (edge.base or 0) for edge in done.skips]
    assert spans.count(8) == 75 // 8
    assert all(
        edge.encodings
        in (
            (),
            ("step",),
            ("dense", "step"),
            ("overwrite",),
            ("dense",),
            ("overwrite", "step"),
            ("dense", "overwrite"),
            ("dense", "overwrite", "step"),
        )
        for edge in done.skips
    )
    for edge in done.skips:
        plan = Plan(held=edge.base, target=edge.version, edges=(edge,))
        assert same(bits_at(grown, plan), grown.bits[edge.version]), edge
    assert all(proof.rebuilt for proof in verify(grown.chain))


def test_a_round_without_news_adds_nothing() -> None:
    grown = Grown(MemoryStore())
    grown.grow(70)
    maintainer = maintainer_of(grown.chain)
    first, second = present(maintainer.round()), present(maintainer.round())
    assert first.skips
    assert not second.skips
    another = present(maintainer_of(Chain.open(grown.store)).round())
    assert not another.skips


def test_a_plan_from_far_behind_takes_skips() -> None:
    grown = Grown(MemoryStore())
    grown.grow(300, density=0.004)
    chain = Chain.open(grown.store)
    head = chain.read(grown.head)
    before = chain.plan(3, head)
    maintainer_of(grown.chain).round()
    chain = Chain.open(grown.store)
    plan = chain.plan(3, head)
    assert len(plan.edges) <= 30 < len(before.edges)
    assert {edge.kind for edge in plan.edges} >= {"skip", "delta"}
    assert same(bits_at(grown, plan), grown.bits[-1])
    assert same(bits_at(grown, chain.plan(None, head)), grown.bits[-1])


def test_a_missing_or_damaged_skip_is_planned_around() -> None:
    grown = Grown(MemoryStore())
    grown.grow(200, density=0.004)
    maintainer_of(grown.chain).round()
    head = grown.chain.read(grown.head)
    taken = [edge for edge in grown.chain.plan(3, head).edges if edge.kind == "skip"]
    store = grown.store
    for number, edge in enumerate(taken[:3]):
        if number == 1:
            store.put(edge.record, b"{}")
        else:
            store.delete(edge.record)
    plan = Chain.open(store).plan(3, head)
    assert not set(plan.edges) & set(taken[:3])
    assert same(bits_at(grown, plan), grown.bits[-1])


def edges_of(grown: Grown) -> tuple[EdgeSummary, ...]:
    return Survey(grown.chain).edges(grown.chain.read(grown.head))


def test_a_survey_names_every_edge_once() -> None:
    grown = Grown(MemoryStore())
    grown.grow(100, density=0.002)
    maintainer_of(grown.chain).round()
    edges = edges_of(grown)
    assert len(set(edges)) == len(edges)
    deltas = [edge.version for edge in edges if edge.kind == "delta"]
    assert deltas == list(range(1, 100))
    assert sum(edge.kind == "skip" for edge in edges) == 12 + 1


def test_two_maintainers_agree_on_every_skip() -> None:
    """Their records race; the loser's parts are named by nobody, and go."""
    grown = Grown(MemoryStore())
    grown.grow(64)
    one, other = maintainer_of(grown.chain), maintainer_of(Chain.open(grown.store))
    known = edges_of(grown)
    other.survey.edges(grown.chain.read(grown.head))
    one.round()
    assert len(edges_of(grown)) > len(known)
    done = present(other.round())  # it has not seen the records of the first
    for edge in itertools.chain(done.skips, edges_of(grown)):
        grown.chain.edge(edge)
    pruner = Pruner(Survey(grown.chain), KeepRule(last=1000), grace_s=0, tagged=lambda _: ())
    plan = present(pruner.run())
    assert not plan.due
    assert all(proof.rebuilt for proof in verify(grown.chain))


@pytest.mark.parametrize("encodings", [("step",), ("step", "overwrite")])
def test_a_skip_that_leads_to_another_state_is_not_recorded(
    encodings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digests of all parts are right, and yet the manifest says another state."""
    grown = Grown(MemoryStore(), encodings=encodings)
    grown.grow(8)
    monkeypatch.setattr(grown, "state", lambda _: StateDigest())
    grown.commit()
    done = present(Maintainer(grown.chain, None).round())
    assert not done.skips
    assert "skip from 0 to 8: the edges from version 0 to version 8" in done.failed[0]
    assert not list(grown.store.list("edges/"))


def test_an_anchor_of_another_state_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    grown = Grown(MemoryStore())
    grown.grow(8)
    monkeypatch.setattr(grown, "state", lambda _: StateDigest())
    wrong = grown.commit()
    with pytest.raises(DigestMismatchError, match="the plan from nothing to version 8"):
        add_anchor(grown.chain, wrong)
    assert not list(grown.store.list("edges/"))
