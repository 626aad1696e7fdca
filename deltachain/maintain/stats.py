"""Statistics of a chain: what lies in its store, and what joining it takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from deltachain.chain.chain import Chain, Committed
from deltachain.chain.plan import Plan
from deltachain.chain.reachable import plan_present
from deltachain.errors import BrokenChainError
from deltachain.format.documents import EdgeSummary
from deltachain.store import ObjectInfo
from deltachain.types import Version

AGES: Final = (1, 10, 100, 1000, 10_000)
"""Versions behind the head of the followers that are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTotal:
    """Objects of one kind.

    Attributes:
        kind: First name of their keys, such as ``deltas``.
        objects: Their number.
        nbytes: Their size in bytes.
    """

    kind: str
    objects: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderPlan:
    """What a reader fetches to reach the head.

    Attributes:
        age: Versions behind the head; ``None`` for a newcomer, who has nothing.
        plan: The cheapest plan whose objects are there; ``None`` if there is none.
    """

    age: Version | None
    plan: Plan | None


def totals(infos: Iterable[ObjectInfo]) -> tuple[KindTotal, ...]:
    """Sum up objects by kind, largest first."""
    sums: dict[str, tuple[int, int]] = {}
    for info in infos:
        kind = info.key.partition("/")[0]
        objects, nbytes = sums.get(kind, (0, 0))
        sums[kind] = objects + 1, nbytes + info.nbytes
    found = (KindTotal(kind=k, objects=n, nbytes=size) for k, (n, size) in sums.items())
    return tuple(sorted(found, key=lambda total: -total.nbytes))


def reader_plans(chain: Chain, head: Committed) -> tuple[ReaderPlan, ...]:
    """Return what a newcomer and followers of several ages fetch."""
    ages = (None, *(age for age in AGES if age <= head.version))
    return tuple(ReaderPlan(age=age, plan=_plan(chain, head, age)) for age in ages)


def _plan(chain: Chain, head: Committed, age: Version | None) -> Plan | None:
    try:
        return plan_present(chain, None if age is None else head.version - age, head)
    except BrokenChainError:
        return None


def per_thousand(
    edges: Iterable[EdgeSummary], documents: Iterable[KindTotal], versions: int
) -> tuple[int, int]:
    """Return bytes and objects that a thousand versions add, as all versions so far did.

    Args:
        edges: All edges of the chain, whether or not their objects were deleted since.
        documents: Totals of manifests and edge records, which are never deleted.
        versions: Number of versions so far.
    """
    edges, documents, share = tuple(edges), tuple(documents), 1000 / max(versions, 1)
    nbytes = sum(e.nbytes for e in edges) + sum(total.nbytes for total in documents)
    objects = sum(e.parts for e in edges) + sum(total.objects for total in documents)
    return round(nbytes * share), round(objects * share)
