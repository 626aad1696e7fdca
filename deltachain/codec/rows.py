"""Rows of a part: small tensors of a layer share a digest, and compact rows have a short form.

See FORMAT.md 3. Names are front coded, sizes of segments are distances from a usual one, and
numbers of elements are left to the segments. The first two save 0.05 to 0.1 bits a change of fp8
codes at 0.1 %, for 96 to 106 M codes in 30, 32 and 64 layers.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from os.path import commonprefix
from typing import Final, NamedTuple

import msgspec

from deltachain.codec.container import MAX_DIRECTORY, Directory, TensorRow
from deltachain.codec.encodings import ENCODINGS
from deltachain.errors import ConfigError
from deltachain.types import StateDigest

HEX: Final = b"0123456789abcdef"

MAX_DIGITS: Final = len(str(MAX_DIRECTORY))
"""Most digits of the length that a name shares with another."""


def with_short_rows(directory: Directory) -> Directory:
    """Return a directory as it is stored. Each directory has one stored form."""
    if not has_compact(directory.tensors):
        return directory
    nnz, gaps = directory.segments.nnz, list(directory.segments.gaps)
    rows, before = [], ""
    for row, own in _with_segments(directory.tensors):
        stored = row
        if is_compact(row):
            pairs = zip(gaps[own], nnz[own], strict=True)
            gaps[own] = [_distance(nbytes, changed) for nbytes, changed in pairs]
            stored = msgspec.structs.replace(row, name=_front_coded(row.name, before), nnz=0)
        rows.append(stored)
        before = row.name
    return _replaced(directory, rows, gaps)


def with_full_rows(directory: Directory) -> Directory:
    """Return a directory as it was before it was stored.

    A stored form that is not canonical is accepted: callers compare it with the result of
    :func:`with_short_rows`.
    """
    if not has_compact(directory.tensors):
        return directory
    nnz, gaps = directory.segments.nnz, list(directory.segments.gaps)
    if len(nnz) != len(gaps):
        raise ValueError("segment columns differ in length")
    rows, before, characters = [], "", 0
    for stored, own in _with_segments(directory.tensors):
        row = stored
        if is_compact(stored):
            pairs = zip(gaps[own], nnz[own], strict=True)
            gaps[own] = [_size(distance, changed) for distance, changed in pairs]
            digits, colon, rest = stored.name.partition(":")
            if not (colon and digits.isdecimal() and len(digits) <= MAX_DIGITS):
                raise ValueError(f"name {stored.name[:80]!r} is not front coded")
            name = before[: int(digits)] + rest
            row = msgspec.structs.replace(stored, name=name, nnz=sum(nnz[own]))
        characters += len(row.name)  # each name may have all characters of the one before
        if characters > MAX_DIRECTORY:
            raise ValueError(f"names of more than {MAX_DIRECTORY} characters")
        rows.append(row)
        before = row.name
    return _replaced(directory, rows, gaps)


def has_compact(rows: Iterable[TensorRow]) -> bool:
    """Return whether the encoding of any row is compact."""
    names = {row.encoding for row in rows}
    return any(name in ENCODINGS and ENCODINGS.get(name).compact for name in names)


def is_compact(row: TensorRow) -> bool:
    """Return whether the encoding of a row is compact; one that is unknown here is not."""
    return row.encoding in ENCODINGS and ENCODINGS.get(row.encoding).compact


def _with_segments(rows: Sequence[TensorRow]) -> Iterator[tuple[TensorRow, slice]]:
    at = 0
    for row in rows:
        yield row, slice(at, at + row.segments)
        at += row.segments


def _replaced(directory: Directory, rows: Sequence[TensorRow], gaps: Sequence[int]) -> Directory:
    segments = msgspec.structs.replace(directory.segments, gaps=tuple(gaps))
    return msgspec.structs.replace(directory, tensors=tuple(rows), segments=segments)


def _front_coded(name: str, before: str) -> str:
    """Return the length of the prefix that two names share, and the rest of the first."""
    shared = len(commonprefix((name, before)))  # noqa: RUF071 - characters, not paths
    return f"{shared}:{name[shared:]}"


def _usual_size(nnz: int) -> int:
    """Return the bytes of changes that take 9 bits each."""
    return nnz * 9 // 8


def _distance(nbytes: int, nnz: int) -> int:
    """Return the distance from the usual size; below it -1, -2, ... become 1, 3, ..."""
    distance = nbytes - _usual_size(nnz)
    return 2 * distance if distance >= 0 else -2 * distance - 1


def _size(distance: int, nnz: int) -> int:
    nbytes = _usual_size(nnz) + (-(distance + 1) // 2 if distance % 2 else distance // 2)
    if nbytes < 0:
        raise ValueError(f"tiles of {nbytes} bytes")
    return nbytes


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
    rows = tuple(rows)
    digests = "".join(row.digest for row in rows).encode(errors="replace")
    if all(len(row.digest) == 32 for row in rows) and not digests.translate(None, HEX):
        return  # each is a digest: in one look at all of them
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
