"""Disjoint sets: the union of sets that have members in common (union-find)."""

from collections.abc import Hashable, Iterable
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def join_sets(groups: Iterable[Iterable[T]]) -> list[frozenset[T]]:
    """Join groups that share members, also over others; return the sets, by their first members."""
    joined: dict[T, list[T]] = {}
    for group in groups:
        first: list[T] | None = None
        for member in group:
            other = joined.setdefault(member, [member])
            if first is None or first is other:
                first = other
                continue
            first, less = (first, other) if len(first) >= len(other) else (other, first)
            first += less
            joined.update(dict.fromkeys(less, first))
    return [frozenset(one) for one in {id(one): one for one in joined.values()}.values()]
