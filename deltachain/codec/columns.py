"""The directory of a part as columns: what is checked of many tensors at once (FORMAT.md 3).

Rows of one *kind* differ in names, counts and digests alone. What an encoding says of a kind is
asked once, with arrays for the counts, so that a part of many tensors costs little a tensor.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from deltachain import errors
from deltachain.codec import container as d
from deltachain.codec.encodings import ENCODINGS, Encoding
from deltachain.types import TensorSpec

Numbers = npt.NDArray[np.int64]

FEW: Final = 4  # rows of a kind up to which they are asked about one by one: arrays would cost more

MOST: Final = 1 << 62  # limit of the length of a stream in its unit, far above that of any object


class Kind(NamedTuple):
    """What rows of one kind have in common; ``row`` and ``spec`` are of the first of them."""

    row: d.TensorRow
    spec: TensorSpec
    encoding: Encoding
    numel: int


@dataclass(frozen=True, slots=True, eq=False)
class RowColumns:
    """All rows and segments of a part, checked.

    Attributes:
        rows: The ``n`` rows.
        number: Number of each row, by name.
        kinds: Kinds of rows.
        kind: ``(n,)`` number of the kind of each row.
        bucket: ``(n,)`` bucket of each row.
        first: ``(n + 1,)`` number of the first segment of each row, and the number of segments.
        segments: ``(segments, 6)`` start, length, nnz, gaps, exceptions and wide.
        before: ``(segments, 6)`` sums of these over the segments of the same row before each.
        turn: ``(segments,)`` position of each segment among all, by bucket, then by row.
        starts: ``(n,)`` start of each row in the streams of its bucket, by stream, in its unit.
        lengths: ``(n,)`` length of each row in each stream; 0 in streams that its kind has not.
        streams: Names of the streams of each kind.
        ends: Length of each stream of the part that is not empty, by full name.
    """

    rows: Sequence[d.TensorRow]
    number: Mapping[str, int]
    kinds: Sequence[Kind]
    kind: Numbers
    bucket: Numbers
    first: Numbers
    segments: Numbers
    before: Numbers
    turn: Numbers
    starts: Mapping[str, Numbers]
    lengths: Mapping[str, Numbers]
    streams: Sequence[Sequence[str]]
    ends: Mapping[str, int]

    def encoding(self, name: str) -> Encoding:
        return self.kinds[self.kind.item(self.number[name])].encoding

    def placed(
        self, name: str
    ) -> tuple[tuple[d.Segment, ...], Mapping[str, int], Mapping[str, int]]:
        """Return the segments of a row, and its start and length in each stream."""
        n = self.number[name]
        own = self.segments[self.first.item(n) : self.first.item(n + 1)].tolist()
        starts, lengths = (
            {stream: some[stream].item(n) for stream in self.streams[self.kind.item(n)]}
            for some in (self.starts, self.lengths)
        )
        return tuple(d.Segment(*one) for one in own), starts, lengths


def columns_of(directory: d.Directory, *, compressed: bool, key: str) -> RowColumns:
    """Check all rows and segments, and determine the place of each row in every stream."""
    rows = directory.tensors
    number = {row.name: n for n, row in enumerate(rows)}
    if len(number) < len(rows):
        name = next(row.name for n, row in enumerate(rows) if number[row.name] != n)
        raise errors.MalformedError(f"{key}: two rows for tensor {name!r}", key=key)
    alike = [(row.encoding, row.dtype, row.shape, row.gap, row.segments > 0) for row in rows]
    firsts = dict(zip(reversed(alike), reversed(rows), strict=True))
    kinds = [_kind(row, compressed=compressed, key=key) for row in firsts.values()]
    numbers = {one: n for n, one in enumerate(firsts)}
    kind = np.array([numbers[one] for one in alike], np.int64)
    for row, n in zip(rows, kind.tolist(), strict=True):
        _check_row(row, kinds[n], key)
    first, segments = _segments(directory, kinds, kind, key)
    lengths, streams = _lengths(rows, kinds, kind, (first, segments), key)
    bucket = np.array([row.bucket for row in rows], np.int64)
    starts, ends = _starts(bucket, lengths, key)
    owner = np.repeat(np.arange(len(rows)), np.diff(first))
    total = np.cumsum(segments, axis=0) - segments
    before = total - total[first[owner]]
    turn = np.empty(len(owner), np.int64)
    turn[np.argsort(bucket[owner], kind="stable")] = np.arange(len(owner))
    placed = kind, bucket, first, segments, before, turn
    return RowColumns(rows, number, kinds, *placed, starts, lengths, streams, ends)


def _kind(row: d.TensorRow, *, compressed: bool, key: str) -> Kind:
    encoding = ENCODINGS.get(row.encoding, key=key)
    if compressed and encoding.own_arrays:
        raise errors.MalformedError(
            f"{key}: {row.name!r}: encoding {row.encoding!r} in a compressed part", key=key
        )
    try:
        return Kind(row, row.spec, encoding, row.spec.numel)
    except errors.ConfigError as exc:
        raise errors.MalformedError(f"{key}: {exc}", key=key) from exc


def _check_row(row: d.TensorRow, kind: Kind, key: str) -> None:
    encoding = kind.encoding
    fits = not encoding.own_arrays or row.gap == row.bucket == row.segments == 0
    if not fits or not encoding.fits_row(row, kind.numel):
        raise inconsistent(row, key)


def _segments(
    directory: d.Directory, kinds: Sequence[Kind], kind: Numbers, key: str
) -> tuple[Numbers, Numbers]:
    """Return :attr:`RowColumns.first` and the segments, each inside its tensor and in order."""
    rows, columns = directory.tensors, msgspec.structs.astuple(directory.segments)
    count = len(columns[0])
    if any(len(column) != count for column in columns):
        raise errors.MalformedError(f"{key}: segment columns differ in length", key=key)
    ends = list(accumulate((row.segments for row in rows), initial=0))
    if ends[-1] > count:
        raise inconsistent(rows[bisect_right(ends, count) - 1], key)
    if ends[-1] < count:  # before there is an array: malicious columns take no memory
        raise errors.MalformedError(f"{key}: more segments than the tensors have", key=key)
    segments = np.empty((count, len(columns)), np.int64)
    for n, column in enumerate(columns):
        segments[:, n] = column
    first = np.array(ends, np.int64)
    owner = np.repeat(np.arange(len(rows)), np.diff(first))
    numel = np.array([one.numel for one in kinds], np.int64)[kind]
    start, length, nnz, _, exceptions, wide = segments.T
    fits = (nnz > 0) & (nnz <= length) & (length <= d.SEGMENT)
    fits &= (start <= numel[owner] - length) & (wide <= exceptions)
    fits[1:] &= (start[1:] - length[:-1] >= start[:-1]) | (owner[1:] != owner[:-1])
    if not fits.all():
        raise inconsistent(rows[owner[fits.argmin()]], key)
    given = np.array([row.nnz for row in rows], np.int64)
    own = np.array([one.encoding.own_arrays for one in kinds], np.bool_)[kind]
    wrong = (sums(nnz, first) != given) & ~own
    if wrong.any():
        raise inconsistent(rows[wrong.argmax()], key)
    return first, segments


def sums(column: Numbers, first: Numbers) -> Numbers:
    """Add up a column of segments for each row; see :attr:`RowColumns.first`."""
    total = np.concatenate([np.zeros(1, np.int64), np.cumsum(column)])
    found: Numbers = total[first[1:]] - total[first[:-1]]
    return found


def _lengths(
    rows: Sequence[d.TensorRow],
    kinds: Sequence[Kind],
    kind: Numbers,
    held: tuple[Numbers, Numbers],
    key: str,
) -> tuple[dict[str, Numbers], list[tuple[str, ...]]]:
    """Check the counts of all segments; return the lengths of rows and the streams of kinds."""
    first, segments = held
    lengths: dict[str, Numbers] = {}
    streams: list[tuple[str, ...]] = []
    theirs = _grouped(np.repeat(kind, np.diff(first)), len(kinds))
    for one, which, own in zip(kinds, _grouped(kind, len(kinds)), theirs, strict=True):
        found: dict[str, Any] = {}
        if one.encoding.own_arrays:
            pass
        elif one.encoding.columns and len(which) > FEW:
            begins = np.append(0, np.cumsum(np.diff(first)[which]))
            columns: Any = segments[own].T
            fits: Any = one.encoding.fits_segment(one.row, d.Segment(*columns))
            wrong = np.flatnonzero(~np.broadcast_to(fits, own.shape))
            if wrong.size:
                raise inconsistent(rows[which[np.searchsorted(begins, wrong[0], "right") - 1]], key)
            total: Any = [sums(column, begins) for column in columns]
            found = dict(one.encoding.streams(one.row, (d.Segment(*total),)))
        else:
            each = [
                _lengths_of(rows[n], one.encoding, segments[first[n] : first[n + 1]], key)
                for n in which.tolist()
            ]
            found = {
                name: [some.get(name, 0) for some in each] for name in dict.fromkeys(chain(*each))
            }
        for name, some in found.items():
            lengths.setdefault(name, np.zeros(len(rows), np.int64))[which] = some
        streams.append(tuple(found))
    return lengths, streams


def _lengths_of(row: d.TensorRow, encoding: Encoding, own: Numbers, key: str) -> Mapping[str, int]:
    """Check the segments of one row; return its length in each stream."""
    segments = tuple(d.Segment(*one) for one in own.tolist())
    if not all(encoding.fits_segment(row, segment) for segment in segments):
        raise inconsistent(row, key)
    found = encoding.streams(row, segments)
    if not all(0 <= length < MOST for length in found.values()):
        raise inconsistent(row, key)
    return found


def _grouped(labels: Numbers, count: int) -> list[Numbers]:
    """Return the positions of each label, ascending."""
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.searchsorted(labels[order], np.arange(1, count)))[:count]


def _starts(
    bucket: Numbers, lengths: Mapping[str, Numbers], key: str
) -> tuple[dict[str, Numbers], dict[str, int]]:
    """Return the start of each row in the streams of its bucket, and the ends of these."""
    order = np.argsort(bucket, kind="stable")
    begins = np.flatnonzero(np.diff(bucket[order], prepend=-1))
    owner = np.repeat(np.arange(len(begins)), np.diff(np.append(begins, len(bucket))))
    starts: dict[str, Numbers] = {}
    ends: dict[str, int] = {}
    for name, length in lengths.items():
        if float(length.sum(dtype=np.float64)) >= MOST:
            raise errors.MalformedError(f"{key}: streams and tensors do not match", key=key)
        after = np.cumsum(length[order])
        before = after - length[order]
        starts[name] = np.empty_like(length)
        starts[name][order] = before - before[begins][owner]
        total = np.add.reduceat(length[order], begins)
        for at in np.flatnonzero(total).tolist():
            ends[d.stream_name(int(bucket[order[begins[at]]]), name)] = int(total[at])
    return starts, ends


def inconsistent(row: d.TensorRow, key: str) -> errors.MalformedError:
    return errors.MalformedError(f"{key}: inconsistent row of tensor {row.name!r}", key=key)
