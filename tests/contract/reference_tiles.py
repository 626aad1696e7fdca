"""Reference kernels of the encoding ``max`` in plain numpy (FORMAT.md 4, "Tiles").

A *tile* is a box of elements of one segment. Its elements are divided into *classes* by their old
bits, and changed ones are stored by their ranks inside their classes, as Rice codes of distances. A
distance may end in a later class, of which each element counts less.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deltachain.codec.encodings.max.tiles import (
    BINS,
    ENDS,
    ESCAPE,
    MAGNITUDES,
    NEVER,
    RANKS,
    Bytes,
    CodedTiles,
    TileGrid,
    TileStreams,
    bins,
)
from deltachain.kernels.arrays import StagedSteps, WindowPlace
from deltachain.types import Bits, Indices
from tests.contract.reference import stage_changes


class ClassRank(NamedTuple):
    """Number of an element inside a class of a tile, and number of the class."""

    kind: int
    rank: int


def count_bins(bits: Bits, shift: int, mask: int) -> npt.NDArray[np.int64]:
    """Count the elements of each bin, ``(256,)``."""
    return np.bincount(bins(bits, shift, mask), minlength=BINS)


def encode_tiles(
    windows: npt.NDArray[np.int64],
    indices: Indices,
    steps: Bits,
    old: Bits,
    table: Bytes,
    grid: TileGrid,
) -> CodedTiles:
    """Encode the changes of some segments.

    Args:
        windows: ``(n, 2)``: start and length of each segment, ascending.
        indices: ``(nnz,)`` flat indices of changed elements, increasing, all in a segment.
        steps: ``(nnz,)`` wrapping steps, not zero.
        old: Bits before the change, from flat index ``grid.start`` on.
        table: ``(512,)``: the rate of each bin, then its size; no rate of a changed element's bin
            is ``NEVER``.
    """
    pieces: list[bytes] = []
    nbytes: list[int] = []
    for start, length in windows.tolist():
        low, high = np.searchsorted(indices, [start, start + length])
        steps_at = np.zeros(length, steps.dtype)
        steps_at[indices[low:high] - start] = steps[low:high]
        there = old[start - grid.start :][:length]
        coded = [
            _encode_tile(_box(there, at, grid), _box(steps_at, at, grid), table, grid)
            for at in range(grid.cuts)
        ]
        sizes = b"".join(_varint(len(one)) for one in coded[:-1])
        pieces += [sizes, *coded]
        nbytes.append(len(sizes) + sum(map(len, coded)))
    return CodedTiles(np.frombuffer(b"".join(pieces), np.uint8), np.array(nbytes, np.int64))


def decode_tiles(segments: npt.NDArray[np.int64], streams: TileStreams) -> tuple[Indices, Bits]:
    """Decode the tiles of some segments of one tensor.

    Args:
        segments: ``(n, 6)``: start, length, nnz, bytes, 0 and 0 of each segment.

    Returns:
        ``(nnz,)`` flat int64 indices, strictly increasing inside the segments, and ``(nnz,)``
        wrapping steps, none of them zero.
    """
    data, old, table, grid, wanted = streams
    found = [np.empty(0, np.int64)], [old[:0]]
    at = 0
    for number, (start, length, nnz, nbytes, _, _) in enumerate(segments.tolist()):
        chosen = [True] * grid.cuts if wanted is None else wanted[number].tolist()
        steps = np.zeros(length, old.dtype)
        tiles = _split(bytes(data[at : at + nbytes]), grid.cuts)
        low = start - grid.start
        for tile, (coded, take) in enumerate(zip(tiles, chosen, strict=True)):
            if take:
                there = _box(old, tile, grid, low, length)
                _box(steps, tile, grid)[:] = _decode_tile(coded, there, table, grid)
        changed = np.flatnonzero(steps)
        if changed.size > nnz or (all(chosen) and changed.size != nnz):
            raise ValueError(RANKS)
        found[0].append(changed + start)
        found[1].append(steps[changed])
        at += nbytes
    return np.concatenate(found[0]), np.concatenate(found[1])


def stage_tiles(
    segments: npt.NDArray[np.int64],
    streams: TileStreams,
    box: WindowPlace,
    weights: Bits,
    key: tuple[int, int],
) -> StagedSteps:
    """Decode tiles as :func:`decode_tiles`, and stage the steps of the elements of a box.

    Args:
        weights: ``(n,)`` live bits; not written.
    """
    return stage_changes(*decode_tiles(segments, streams), box, weights, key)


def _box(bits: Bits, tile: int, grid: TileGrid, low: int = 0, length: int | None = None) -> Bits:
    """Return a view of the elements of one tile of a segment."""
    mine = bits[low:] if length is None else bits[low : low + length]
    if grid.cuts == 1:
        return mine
    width = grid.columns // grid.cuts
    return mine.reshape(-1, grid.columns)[:, tile * width : (tile + 1) * width]


def _classes(table: Bytes) -> list[tuple[int, npt.NDArray[np.bool_]]]:
    """Return the rate of each class, ascending, and the bins that are in it."""
    rates = table[:BINS]
    return [(int(rate), rates == rate) for rate in np.unique(rates) if rate != NEVER]


def _encode_tile(old: Bits, steps: Bits, table: Bytes, grid: TileGrid) -> bytes:
    flat, changed = old.reshape(-1), steps.reshape(-1)
    width = 8 * old.itemsize
    found, out = bins(flat, grid.shift, grid.mask), _BitWriter()
    classes = _classes(table)
    members = [np.flatnonzero(mine[found]) for _, mine in classes]
    path = [(rate, positions.size) for (rate, _), positions in zip(classes, members, strict=True)]
    here = ClassRank(0, 0)
    for kind, positions in enumerate(members):
        for rank in np.flatnonzero(changed[positions]).tolist():
            _put_distance(out, path, here, ClassRank(kind, rank))
            there = positions[rank]
            _put_step(out, int(changed[there]), int(table[BINS + int(found[there])]), width)
            here = ClassRank(kind, rank + 1)
    _put_distance(out, path, here, ClassRank(len(path), 0))
    return out.bytes()


def _put_distance(
    out: "_BitWriter", path: Sequence[tuple[int, int]], here: ClassRank, there: ClassRank
) -> None:
    """Write the distance of two ranks, or from one to the end.

    ``path`` has rate and number of elements of each class; ``there`` is the next changed element,
    or rank 0 behind the last class.
    """
    kind, rank = here
    while kind < len(path):
        rate, total = path[kind]
        more = path[kind + 1][0] - rate if kind + 1 < len(path) else 0
        if rank < total:
            passed = ((total - 1 - rank) >> rate) + 1
            ahead = there.kind < len(path)
            distance = _rank_in(path, kind, there) - rank if ahead else 0
            if ahead and distance >> rate < passed:
                out.unary(distance >> rate)
                out.put(distance & ((1 << rate) - 1), rate)
                for later in range(kind + 1, there.kind + 1):
                    fewer = path[later][0] - path[later - 1][0]
                    out.put(_rank_in(path, later, there) & ((1 << fewer) - 1), fewer)
                return
            out.ones(passed)
            rank += passed << rate
        kind, rank = kind + 1, (rank - total) << more


def _rank_in(path: Sequence[tuple[int, int]], kind: int, there: ClassRank) -> int:
    """Return a rank of a later class as one in a class, behind its elements."""
    rank = there.rank
    for earlier in reversed(range(kind, there.kind)):
        rate, total = path[earlier]
        rank = total + (rank >> (path[earlier + 1][0] - rate))
    return rank


def _put_step(out: "_BitWriter", step: int, size: int, width: int) -> None:
    negative = step >> (width - 1)
    out.put(negative, 1)
    if size == NEVER:
        return
    excess = ((1 << width) - step if negative else step) - 1
    if excess >> size >= ESCAPE:
        out.ones(ESCAPE)
        out.put(excess, width)
    else:
        out.unary(excess >> size)
        out.put(excess & ((1 << size) - 1), size)


def _decode_tile(coded: bytes, old: Bits, table: Bytes, grid: TileGrid) -> Bits:
    """Return the step of every element of a tile, 0 for those that did not change."""
    flat = old.reshape(-1)
    steps = np.zeros(flat.size, old.dtype)
    found, data = bins(flat, grid.shift, grid.mask), _BitReader(coded)
    rank, before, reached = 0, 0, False
    for rate, members in _classes(table):
        positions = np.flatnonzero(members[found])
        more, before = rate - before, rate
        rank = (rank << more) + (data.take(more) if reached else 0)
        while rank < positions.size:
            if not reached:
                last = (positions.size - 1 - rank) >> rate
                quotient = data.unary(last + 1)
                reached = quotient <= last
                rank += (quotient << rate) + (data.take(rate) if reached else 0)
                continue
            there, reached = positions[rank], False
            steps[there] = _take_step(data, int(table[BINS + int(found[there])]), 8 * old.itemsize)
            rank += 1
        rank -= positions.size
    if reached:
        raise ValueError(RANKS)
    data.end()
    return steps.reshape(old.shape)


def _take_step(data: "_BitReader", size: int, width: int) -> int:
    negative = data.take(1)
    excess = 0
    if size != NEVER:
        quotient = data.unary(ESCAPE)
        if quotient < ESCAPE:
            excess = (quotient << size) + data.take(size)
        else:
            excess = data.take(width)
            if excess >> size < ESCAPE:
                raise ValueError(MAGNITUDES)
    if excess + 1 >= (1 << (width - 1)) + negative:
        raise ValueError(MAGNITUDES)
    return (1 << width) - excess - 1 if negative else excess + 1


def _varint(value: int) -> bytes:
    """Return seven bits a byte, lowest first; all but the last byte have the highest bit set."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _split(data: bytes, count: int) -> list[bytes]:
    """Split the bytes of a segment at the ends of its tiles."""
    sizes, at = [], 0
    for _ in range(count - 1):
        value, shift = 0, 0
        while True:
            if at == len(data) or shift > 21:
                raise ValueError(ENDS)
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        if byte == 0 and shift > 7:
            raise ValueError(ENDS)
        sizes.append(value)
    if at + sum(sizes) > len(data):
        raise ValueError(ENDS)
    tiles = []
    for size in sizes:
        tiles.append(data[at : at + size])
        at += size
    return [*tiles, data[at:]]


class _BitWriter:
    def __init__(self) -> None:
        self._bits: list[int] = []

    def put(self, value: int, count: int) -> None:
        self._bits += [value >> n & 1 for n in range(count)]

    def ones(self, count: int) -> None:
        self._bits += [1] * count

    def unary(self, value: int) -> None:
        self._bits += [1] * value + [0]

    def bytes(self) -> bytes:
        return np.packbits(np.array(self._bits, np.uint8), bitorder="little").tobytes()


class _BitReader:
    def __init__(self, data: bytes) -> None:
        self._bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").tobytes()
        self._at = 0

    def take(self, count: int) -> int:
        mine = self._bits[self._at : self._at + count]
        if len(mine) < count:
            raise ValueError(ENDS)
        self._at += count
        return sum(bit << n for n, bit in enumerate(mine))

    def unary(self, limit: int) -> int:
        """Count one bits up to a zero bit, which is passed, or up to ``limit`` of them."""
        start = self._at
        zero = self._bits.find(0, start, start + limit)
        if zero < 0 and start + limit > len(self._bits):
            raise ValueError(ENDS)
        self._at = start + limit if zero < 0 else zero + 1
        return limit if zero < 0 else zero - start

    def end(self) -> None:
        rest = self._bits[self._at :]
        if len(rest) > 7 or any(rest):
            raise ValueError(ENDS)
