"""Sets that share members are joined."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from deltachain.disjoint_sets import join_sets

groups = st.lists(st.lists(st.integers(0, 12), max_size=4), max_size=12)


def slowly(given_groups: list[list[int]]) -> set[frozenset[int]]:
    found = {frozenset(group) for group in given_groups if group}
    while pair := next((p for p in itertools.combinations(found, 2) if p[0] & p[1]), None):
        found = found - set(pair) | {pair[0] | pair[1]}
    return found


@given(groups)
def test_they_are_joined_over_others(some: list[list[int]]) -> None:
    found = join_sets(some)
    assert set(found) == slowly(some)
    assert len(found) == len(set(found))
    order = list(dict.fromkeys(itertools.chain.from_iterable(some)))
    assert [min(map(order.index, one)) for one in found] == sorted(
        min(map(order.index, one)) for one in found
    )


def test_long_chains_take_no_time() -> None:
    pairs = itertools.pairwise(range(200_000))
    assert join_sets(pairs) == [frozenset(range(200_000))]
