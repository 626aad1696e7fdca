from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltachain.chain.plan import REQUEST_NBYTES, Plan, cost_of, make_plan
from deltachain.errors import BrokenChainError
from deltachain.format.documents import EdgeKind, EdgeSummary

KNOWN = frozenset({"step", "dense"})


def edge(
    version: int,
    base: int | None,
    nbytes: int = 100,
    *,
    parts: int = 1,
    encodings: tuple[str, ...] = ("step",),
) -> EdgeSummary:
    kind: EdgeKind = "anchor" if base is None else "delta" if base == version - 1 else "skip"
    return EdgeSummary(
        version=version,
        kind=kind,
        base=base,
        nbytes=nbytes,
        parts=parts,
        encodings=encodings,
        state="",
    )


@st.composite
def graphs(draw: st.DrawFn) -> list[EdgeSummary]:
    def one() -> EdgeSummary:
        version = draw(st.integers(0, 7))
        base = draw(st.one_of(st.none(), st.integers(0, version - 1))) if version else None
        encodings = draw(st.sampled_from([("step",), ("dense", "step"), ("max",), ()]))
        nbytes = draw(st.integers(0, 4)) * REQUEST_NBYTES // 2
        return edge(version, base, nbytes, parts=draw(st.integers(0, 3)), encodings=encodings)

    return [one() for _ in range(draw(st.integers(0, 14)))]


def every_way(held: int | None, target: int, edges: list[EdgeSummary]) -> list[list[EdgeSummary]]:
    """All ways from what is held, or from nothing, to a version."""
    ways: list[list[EdgeSummary]] = [[]] if held == target else []
    for last in edges:
        if last.version == target and KNOWN.issuperset(last.encodings):
            if last.base is None:
                ways.append([last])
            else:
                ways += [[*way, last] for way in every_way(held, last.base, edges)]
    return ways


@settings(max_examples=400, deadline=None)
@given(graphs(), st.one_of(st.none(), st.integers(0, 7)), st.integers(0, 7))
def test_the_plan_is_the_cheapest_of_all_ways(
    edges: list[EdgeSummary], held: int | None, target: int
) -> None:
    ways = every_way(held, target, edges)
    if not ways:
        with pytest.raises(BrokenChainError):
            make_plan(held, target, edges, encodings=KNOWN)
        return
    plan = make_plan(held, target, edges, encodings=KNOWN)
    assert list(plan.edges) in ways
    assert plan.cost == min(sum(cost_of(e) for e in way) for way in ways)
    assert (plan.held, plan.target) == (held, target)


@settings(max_examples=50, deadline=None)
@given(graphs(), st.randoms(use_true_random=False))
def test_the_order_of_edges_does_not_matter(edges: list[EdgeSummary], random: Random) -> None:
    shuffled = list(edges)
    random.shuffle(shuffled)
    for target in range(8):
        costs = []
        for order in (edges, shuffled):
            try:
                costs.append(make_plan(None, target, order, encodings=KNOWN).cost)
            except BrokenChainError:
                costs.append(-1)
        assert costs[0] == costs[1]


def test_nothing_is_to_do_where_the_target_is_held() -> None:
    plan = make_plan(3, 3, [edge(3, None)], encodings=KNOWN)
    assert (plan.edges, plan.cost, plan.requests, plan.nbytes) == ((), 0, 0, 0)
    assert str(plan) == "3 to 3: nothing to do; 0 B, 0 requests"


def test_unknown_encodings_disable_the_edge_alone() -> None:
    edges = [edge(0, None), edge(1, 0, 10, encodings=("max",)), edge(1, None, 999)]
    assert make_plan(0, 1, edges, encodings=KNOWN).edges == (edges[2],)
    assert make_plan(0, 1, edges, encodings=KNOWN | {"max"}).edges == (edges[1],)


def test_the_cheaper_of_two_ways_is_taken() -> None:
    deltas = [edge(n, n - 1, 1 << 20) for n in range(1, 6)]
    plan = make_plan(0, 5, [*deltas, edge(5, None, 1 << 20)], encodings=KNOWN)
    assert [e.kind for e in plan.edges] == ["anchor"]
    edges = [*(edge(n, n - 1, 10) for n in range(1, 9)), edge(8, 0, 90)]
    assert [e.kind for e in make_plan(0, 8, edges, encodings=KNOWN).edges] == ["skip"]


def test_a_plan_prints_what_it_fetches() -> None:
    edges = (edge(4, None, 12_000_000, parts=3), edge(5, 4, 1_000))
    plan = Plan(held=None, target=5, edges=edges)
    assert str(plan) == (
        "nothing to 5: anchor->4 (12,000,000 B), delta->5 (1,000 B); 12,001,000 B, 6 requests"
    )
    assert plan.cost == 12_001_000 + 6 * REQUEST_NBYTES


@pytest.mark.parametrize(("held", "origin"), [(None, "nothing"), (2, "version 2")])
def test_without_a_way_the_error_says_from_where(held: int | None, origin: str) -> None:
    with pytest.raises(BrokenChainError, match=f"from {origin} to version 9") as caught:
        make_plan(held, 9, [edge(9, 8), edge(2, None)], encodings=KNOWN)
    assert caught.value.version == 9
