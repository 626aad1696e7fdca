"""Digests of the rows of a part, of which small tensors of a layer share one (FORMAT.md 3)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import msgspec

from deltachain.codec.container import TensorRow
from deltachain.codec.encodings.registry import ENCODINGS
from deltachain.codec.short_rows import is_compact
from deltachain.disjoint_sets import join_sets
from deltachain.errors import ConfigError
from deltachain.types import StateDigest

SHARED_NUMEL: Final = 1 << 22
"""Most elements of tensors that share a digest. Where every matrix has its own, digests take 0.3 to
0.6 bits a change at 0.1 % of fp8 codes, for 105 M parameters in 32 and in 64 layers."""

_LAYER: Final = re.compile(r".*?\.\d+\.")


def own_digests(rows: Iterable[TensorRow]) -> dict[str, StateDigest]:
    """Return the digests that rows have for themselves alone, by name."""
    alone = (group[0] for group in groups(rows) if len(group) == 1)
    return {row.name: StateDigest.parse(row.digest) for row in alone}


class SharedSum(NamedTuple):
    """Sum of the changes of the rows of one digest, beside that digest."""

    expected: StateDigest
    actual: StateDigest


def may_share(row: TensorRow) -> bool:
    """Return whether a row may leave its digest to a later row of the same encoding.

    Rows without old bits may not: those are read also where some tensors of a layer are not held.
    """
    return is_compact(row) and ENCODINGS.get(row.encoding).decodes_with_old(row)


def check_digests(rows: Iterable[TensorRow]) -> None:
    """Check the digests of all rows of a part."""
    left: TensorRow | None = None
    for row in rows:
        if row.digest:
            StateDigest.parse(row.digest)
        elif not may_share(row):
            raise ConfigError(f"no digest of tensor {row.name!r}")
        if may_share(row):
            left = None if row.digest else row
    if left is not None:
        raise ConfigError(f"no row has the digest of tensor {left.name!r}")


def share(rows: Sequence[TensorRow]) -> list[TensorRow]:
    """Return rows in which small tensors of a layer leave their digests to the last of them."""
    shared = list(rows)
    numel = 0
    for at, then in pairwise(number for number, row in enumerate(rows) if may_share(row)):
        row, following = rows[at], rows[then]
        numel += row.spec.numel
        layer = _LAYER.match(row.name)
        alike = layer is not None and following.name.startswith(layer.group())
        if not alike or numel + following.spec.numel > SHARED_NUMEL:
            numel = 0
            continue
        total = StateDigest.parse(shared[at].digest) + StateDigest.parse(following.digest)
        shared[at] = msgspec.structs.replace(shared[at], digest="")
        shared[then] = msgspec.structs.replace(following, digest=str(total))
    return shared


def groups(rows: Iterable[TensorRow]) -> Iterator[tuple[TensorRow, ...]]:
    """Yield the rows of each digest, of which the last one has it."""
    group: list[TensorRow] = []
    for row in rows:
        if not may_share(row):
            yield (row,)
            continue
        group.append(row)
        if row.digest:
            yield tuple(group)
            group = []


def changes_of(
    parts: Sequence[Iterable[TensorRow]],
) -> Iterator[tuple[frozenset[str], StateDigest]]:
    """Yield sets of tensors, and the sum of their changes by the rows of some parts.

    Sets are as small as shared digests allow: most have one tensor.
    """
    digests = [group for rows in parts for group in groups(rows)]
    found = join_sets([row.name for row in group] for group in digests)
    sums = [StateDigest() for _ in found]
    number = {name: n for n, names in enumerate(found) for name in names}
    for *_, last in digests:
        sums[number[last.name]] += StateDigest.parse(last.digest)
    yield from zip(found, sums, strict=True)


class RowDigests:
    """Comparison of the changes that a part decodes to with the digests of its rows."""

    def __init__(self, rows: Iterable[TensorRow]) -> None:
        self._digests: dict[str, StateDigest] = {}
        self._group: dict[str, str] = {}
        self._left: dict[str, int] = {}
        self._sums: dict[str, StateDigest] = {}
        for group in groups(rows):
            last = group[-1].name
            self._digests[last] = StateDigest.parse(group[-1].digest)
            self._left[last] = len(group)
            self._sums[last] = StateDigest()
            self._group.update((row.name, last) for row in group)

    def add(self, name: str, change: StateDigest) -> SharedSum | None:
        """Add the change of a row; return the comparison if it was the last one of its digest."""
        last = self._group[name]
        self._sums[last] += change
        self._left[last] -= 1
        return None if self._left[last] else SharedSum(self._digests[last], self._sums[last])

    def named(self, name: str) -> str:
        """Return the names of the rows that share a row's digest, as text."""
        last = self._group[name]
        return _listed(one for one, other in self._group.items() if other == last)


def _listed(names: Iterable[str]) -> str:
    first, *rest = names
    return f"{first!r} to {rest[-1]!r}" if rest else repr(first)
