"""The encoding ``max``, read by FORMAT.md alone: it shares no code with deltachain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any, Final

from tests.format.stranger_base import require

BINS: Final = {"BF16": (7, 255), "F16": (10, 31), "F32": (23, 255), "F64": (55, 255)}


class Bits:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> int:
        require(self.at + count <= 8 * len(self.data), "a tile ends early")
        bits = range(self.at, self.at + count)
        self.at += count
        return sum((self.data[n // 8] >> n % 8 & 1) << n - bits.start for n in bits)

    def ones(self, most: int) -> int:
        count = 0
        while count < most and self.take(1):
            count += 1
        return count

    def finish(self) -> None:
        left = 8 * len(self.data) - self.at
        require(left < 8 and self.take(left) == 0, "a tile is too long")


def bin_of(row: dict[str, Any], width: int, bits: int) -> int:
    shift, mask = BINS.get(row["dtype"], (0, 255 if width == 1 else 0))
    return bits >> shift & mask if row["gap"] else 0


def read_class(row: dict[str, Any], width: int, data: bytes) -> tuple[bytes, bytes]:
    rates, sizes = data[:256], data[256:]
    last = bin_of(row, width, (1 << 8 * width) - 1)
    for number, (rate, size) in enumerate(zip(rates, sizes, strict=True)):
        require(rate == 255 or (rate <= 20 and number <= last), "rate")
        require(size == 255 or (size <= 31 and rate != 255), "size")
    return rates, sizes


def tiles_of(row: dict[str, Any], segment: dict[str, int]) -> list[list[int]]:
    """Flat indices of the elements of each tile."""
    first, stop, count = segment["start"], segment["start"] + segment["length"], row["gap"]
    if count < 2:
        return [list(range(first, stop))]
    columns = row["shape"][-1]
    width = columns // count
    return [
        [n for n in range(first, stop) if n % columns // width == tile] for tile in range(count)
    ]


def split(data: bytes, count: int) -> Iterator[bytes]:
    sizes = []
    for _ in range(count - 1):
        size, n = 0, 0
        while True:
            require(len(data) > 0 and n < 4, "sizes of tiles")
            size |= (data[0] & 127) << 7 * n
            more, is_zero, data, n = data[0] > 127, data[0] == 0, data[1:], n + 1
            if not more:
                break
        require(n == 1 or not is_zero, "sizes of tiles")
        sizes.append(size)
    for size in sizes:
        require(size <= len(data), "sizes of tiles")
        yield data[:size]
        data = data[size:]
    yield data


def read_tile(
    row: dict[str, Any],
    width: int,
    tables: tuple[bytes, bytes],
    there: Sequence[tuple[int, int]],
    data: bytes,
) -> Iterator[tuple[int, int]]:
    """Index and step of the changed elements of a tile, from index and old bits of all."""
    bits, (rates, sizes) = Bits(data), tables
    classes = [
        (rate, [one for one in there if rates[bin_of(row, width, one[1])] == rate])
        for rate in sorted(set(rates) - {255})
    ]
    number, at = 0, 0
    while number < len(classes):
        rate, mine = classes[number]
        if at >= len(mine):
            number, at = following(classes, number, at)
        elif bits.take(1):
            at += 1 << rate
        else:
            at += bits.take(rate)
            while at >= len(classes[number][1]):
                require(number + 1 < len(classes), "a rank leaves the tile")
                more = classes[number + 1][0] - classes[number][0]
                number, at = following(classes, number, at)
                at += bits.take(more)
            index, old = classes[number][1][at]
            yield index, read_step(bits, sizes[bin_of(row, width, old)], 8 * width)
            at += 1
    bits.finish()


def following(classes: Sequence[tuple[int, Sized]], number: int, at: int) -> tuple[int, int]:
    """The next class, and the place in it of one behind a class."""
    at -= len(classes[number][1])
    if number + 1 < len(classes):
        at <<= classes[number + 1][0] - classes[number][0]
    return number + 1, at


def read_step(bits: Bits, size: int, width: int) -> int:
    sign, less = bits.take(1), 0
    if size != 255:
        quotient = bits.ones(24)
        if quotient < 24:
            less = (quotient << size) + bits.take(size)
        else:
            less = bits.take(width)
            require(less >= 24 << size, "steps are not canonical")
    step = (1 << width) - less - 1 if sign else less + 1
    require(0 < step < 1 << width and step >> width - 1 == sign, "steps are not canonical")
    return step


def read_tiles(
    row: dict[str, Any],
    width: int,
    segments: Sequence[dict[str, int]],
    data: tuple[bytes, Sequence[bytes]],
    old: Sequence[int],
) -> tuple[list[int], list[int]]:
    """Indices and steps of a tensor, from its ``class`` and the bytes of each segment."""
    found: list[tuple[int, int]] = []
    tables = read_class(row, width, data[0])
    for segment, mine in zip(segments, data[1], strict=True):
        before = len(found)
        tiles = zip(tiles_of(row, segment), split(mine, row["gap"]), strict=True)
        for places, tile in tiles:
            there = [(n, old[n] if row["gap"] else 0) for n in places]
            found += read_tile(row, width, tables, there, tile)
        require(len(found) - before == segment["nnz"], "nnz")
    found.sort()
    return [index for index, _ in found], [step for _, step in found]
