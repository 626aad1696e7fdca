"""Ranges of an object that hold the frames of some elements: what a reader of ranges fetches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from deltachain.codec.decode import Part
from deltachain.codec.directory import in_bits, stream_name
from deltachain.codec.encodings import ENCODINGS
from deltachain.codec.frames import StreamReader

Range = tuple[int, int]
"""First byte, and the byte after the last."""


def stored_ranges(part: Part, wanted: Mapping[str, Range]) -> list[Range]:
    """Return the ranges of bytes that hold given elements, ascending and apart.

    Args:
        part: The open object; only its front is read.
        wanted: Range of flat indices of each tensor to be read, by name; other tensors are not.
    """
    return joined(stream.stored(start, stop) for stream, start, stop in _streams(part, wanted))


def check_ranges(part: Part, wanted: Mapping[str, Range]) -> None:
    """Verify every frame that holds given elements.

    Raises:
        DigestMismatchError: A frame differs from its digest in the directory.
    """
    for stream, start, stop in _streams(part, wanted):
        stream.check_range(start, stop)


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Sort ranges, and join those that touch or overlap."""
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def _streams(part: Part, wanted: Mapping[str, Range]) -> Iterator[tuple[StreamReader, int, int]]:
    """Yield the ranges of streams that hold given elements; none is empty."""
    for name, near in wanted.items():
        if name in part.rows:
            yield from _streams_of(part, name, near)


def _streams_of(part: Part, name: str, near: Range) -> Iterator[tuple[StreamReader, int, int]]:
    reader = part.reader(name, near)
    encoding = ENCODINGS.get(reader.row.encoding)
    if encoding.own_arrays:
        for array in encoding.arrays(reader.row):
            if reader.streams[array].nbytes:
                yield reader.streams[array], 0, reader.streams[array].nbytes
        return
    for stream, count in reader.lengths.items():
        start, stop = reader.starts[stream], reader.starts[stream] + count
        if in_bits(stream):
            start, stop = start // 8, (stop + 7) // 8
        if count:
            yield reader.streams[stream_name(reader.row.bucket, stream)], start, stop
