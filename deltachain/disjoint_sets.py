"""Disjoint sets: the union of sets that have members in common (union-find)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def join_sets(groups: Iterable[Iterable[T]]) -> list[frozenset[T]]:
    """Join groups that share members, also over others; return the sets, by their first members."""
    leader: dict[T, T] = {}

    def find(member: T) -> T:
        while leader[member] != member:
            leader[member] = leader[leader[member]]
            member = leader[member]
        return member

    for group in groups:
        first: T | None = None
        for member in group:
            leader.setdefault(member, member)
            if first is None:
                first = find(member)
            else:
                leader[find(member)] = first
    found: dict[T, list[T]] = {}
    for member in leader:
        found.setdefault(find(member), []).append(member)
    return [frozenset(members) for members in found.values()]
