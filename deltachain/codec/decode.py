"""Decoding of a part to deltas; all input is untrusted until verified (FORMAT.md 3 and 4)."""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import msgspec
import numpy as np

from deltachain import errors
from deltachain.codec import container
from deltachain.codec import container as d
from deltachain.codec.columns import RowColumns, columns_of
from deltachain.codec.encode import FORMAT
from deltachain.codec.encodings import ENCODINGS, TensorReader
from deltachain.codec.frames import FRAME, Frames, StreamReader, inflate
from deltachain.codec.rows import check_digests, with_full_rows, with_short_rows
from deltachain.delta import WINDOW_NBYTES, OldBits, TensorDelta, pieces
from deltachain.format.documents import decode
from deltachain.format.keys import object_digest
from deltachain.types import Buffer


class _Source:
    def __init__(self, data: Buffer) -> None:
        self.data: Buffer = memoryview(data)

    def read_at(self, start: int, length: int) -> Buffer:
        return self.data[start : start + length]


class Part:
    """An open payload object with a verified directory; its tensors are read on demand.

    Only the frames of a requested tensor are read, verified and inflated. Not thread-safe; opening
    an object twice is cheap.

    Attributes:
        digest: blake3 of the front of the file, as stored in it.
        columns: Rows and segments of the directory, checked.
        front_nbytes: Bytes before the streams: header, directory and their digest.
        ranges: Offsets and bytes of all that was fetched, of an object that is not fetched whole.
    """

    def __init__(self, read_at: container.ReadAt, nbytes: int, *, key: str = "") -> None:
        self.key, self.nbytes = key, nbytes
        self.ranges: list[tuple[int, Buffer]] = []
        self._source = _Source(b"")
        header = container.read_header(read_at, nbytes, key=key)
        self.compressed = _check_metadata(header, key)
        self.digest = _check_front(header, read_at, key)
        self.front_nbytes = header.entries["digest"].stop
        self.directory = _read_directory(header, read_at, compressed=self.compressed, key=key)
        self.columns = columns_of(self.directory, compressed=self.compressed, key=key)
        try:
            check_digests(self.directory.tensors)
        except errors.ConfigError as exc:
            raise errors.MalformedError(f"{key}: {exc}", key=key) from exc
        self.rows = MappingProxyType(dict(zip(self.columns.number, self.columns.rows, strict=True)))
        self._streams = {
            row.name: StreamReader(frames, read_at, compressed=self.compressed, key=key)
            for row, frames in _frames(self.directory, header, compressed=self.compressed, key=key)
        }
        _check_streams(self.columns, header, self._streams, key)

    @classmethod
    def from_bytes(cls, data: Buffer, *, key: str = "") -> "Part":
        """Open an object in memory or in a memory map."""
        source = _Source(data)
        part = cls(source.read_at, len(data), key=key)
        part._source = source
        return part

    @property
    def data(self) -> Buffer:
        """The object's bytes; empty unless opened by :meth:`from_bytes`."""
        return self._source.data

    def use_copy(self, data: Buffer) -> None:
        """Read from another copy of the object's bytes from now on, and release the first."""
        self._source.data = memoryview(data)
        self.ranges.clear()

    @property
    def nnz(self) -> int:
        return sum(row.nnz for row in self.rows.values())

    def verify(self) -> None:
        """Verify every byte of the object; decode what needs no old bits."""
        for stream in self.directory.streams:
            for number in range(len(stream.stored)):
                self._streams[stream.name].check(number)
        for name, row in self.rows.items():
            if self.needs_old(name):
                continue
            nnz = 0
            for _, low, high in pieces([row.spec], WINDOW_NBYTES):
                nnz += self.read(name, (low, high)).within(low, high).nnz
            if nnz != row.nnz:
                what = f"{self.key}: {name!r} has {nnz} elements of {row.nnz}"
                raise errors.MalformedError(what, key=self.key)

    def __iter__(self) -> Iterator[TensorDelta]:
        return (self.read(name) for name in self.rows)

    def read(
        self, name: str, near: tuple[int, int] | None = None, *, old: OldBits | None = None
    ) -> TensorDelta:
        """Decode and validate one tensor.

        Segments without elements in the range ``near`` of flat indices are not read, and their
        elements may be missing in the result; elements outside may be in it. ``old`` has the bits
        of all elements in ``near``, for encodings that need them.
        """
        try:
            delta = self._decode(name, near, old)
            if self.columns.encoding(name).checked:
                return delta
            return delta.validate(in_part=near is not None)
        except errors.MalformedError as exc:
            if exc.key:
                raise
            raise errors.MalformedError(f"{self.key}: {exc.args[0]}", key=self.key) from exc

    def needs_old(self, name: str) -> bool:
        """Return whether :meth:`read` needs the old bits of a tensor."""
        return self.columns.encoding(name).decodes_with_old(self.rows[name])

    def reader(
        self, name: str, near: tuple[int, int] | None = None, *, old: OldBits | None = None
    ) -> TensorReader:
        """Return a reader of the segments of a tensor; see :meth:`read`."""
        row, encoding = self.rows[name], self.columns.encoding(name)
        kept, starts, lengths = self.columns.placed(name)
        if near is not None and kept:
            first, last = d.segments_near(kept, *near)
            if (first, last) != (0, len(kept)):
                before = encoding.streams(row, kept[:first])
                starts = {
                    n: at + before[n] * (n not in encoding.shared) for n, at in starts.items()
                }
                kept = kept[first:last]
                lengths = encoding.streams(row, kept)
        return TensorReader(
            spec=row.spec,
            row=row,
            segments=kept,
            is_part=near is not None,
            key=self.key,
            starts=starts,
            lengths=lengths,
            ends=self.columns.ends,
            streams=self._streams,
            old=old,
            near=near,
        )

    def run(
        self, row: d.TensorRow, starts: Mapping[str, int], lengths: Mapping[str, int]
    ) -> TensorReader:
        """Return a reader of ranges of the streams of a row's bucket, in the unit of each."""
        return TensorReader(
            spec=row.spec,
            row=row,
            segments=(),
            is_part=True,
            key=self.key,
            starts=starts,
            lengths=lengths,
            ends=self.columns.ends,
            streams=self._streams,
        )

    def _decode(self, name: str, near: tuple[int, int] | None, old: OldBits | None) -> TensorDelta:
        reader = self.reader(name, near, old=old)
        row = reader.row
        expected = sum(s.nnz for s in reader.segments) if row.segments else row.nnz
        delta = self.columns.encoding(name).decode(reader)
        is_part = old is not None and old.held is not None  # some tiles may be of other ranks
        is_part = is_part or (near is not None and self.columns.encoding(name).own_arrays)
        fits = delta.nnz == expected or (is_part and delta.nnz < expected)
        if delta.spec != reader.spec or not fits:
            raise reader.malformed(f"decodes to {delta.nnz} elements of {expected}")
        return delta


def _check_metadata(header: container.Header, key: str) -> bool:
    """Check the format number and the compression; return whether streams are compressed."""
    version = header.metadata.get("deltachain")
    if version is None:
        raise errors.MalformedError(f"{key}: not a deltachain part: no format number", key=key)
    if version != FORMAT:
        raise errors.UnsupportedFormatError(
            f"{key}: format {version}, this reads {FORMAT}", key=key
        )
    compression = header.metadata.get("compression")
    if compression not in ("zstd", "none"):
        raise errors.UnsupportedFormatError(f"{key}: compression {compression!r}", key=key)
    return compression == "zstd"


def _entry(header: container.Header, name: str, position: int, key: str) -> container.Entry:
    names = list(header.entries)
    if len(names) <= position or names[position] != name:
        raise errors.MalformedError(f"{key}: entry {position} is not {name!r}", key=key)
    entry = header.entries[name]
    if (entry.dtype, entry.shape) != ("U8", (entry.nbytes,)):
        raise errors.MalformedError(f"{key}: {name!r} is {entry.dtype}{entry.shape}", key=key)
    return entry


def _check_front(header: container.Header, read_at: container.ReadAt, key: str) -> str:
    """Verify header and directory against the digest stored after them; return the digest."""
    _entry(header, "directory", 0, key)
    entry = _entry(header, "digest", 1, key)
    if entry.nbytes != 32:
        raise errors.MalformedError(f"{key}: digest of {entry.nbytes} bytes", key=key)
    expected = bytes(read_at(entry.start, 32)).hex()
    front = read_at(0, entry.start)
    actual = object_digest(front)
    if actual != expected:
        raise errors.DigestMismatchError(
            f"{key}: directory", expected=expected, actual=actual, key=key
        )
    entries = [(e.name, e.dtype, e.shape, e.nbytes) for e in header.entries.values()]
    if front[: header.nbytes] != container.write_header(header.metadata, entries):
        raise errors.MalformedError(f"{key}: the header is not canonical", key=key)
    return actual


def _read_directory(
    header: container.Header, read_at: container.ReadAt, *, compressed: bool, key: str
) -> d.Directory:
    entry = _entry(header, "directory", 0, key)
    data = read_at(entry.start, entry.nbytes)
    claimed = header.metadata.get("directory_nbytes", "")
    nbytes = int(claimed) if claimed.isdecimal() and len(claimed) < 10 else -1
    fits = nbytes >= 0 and str(nbytes) == claimed and (compressed or nbytes == entry.nbytes)
    if not fits or nbytes > d.MAX_DIRECTORY:
        raise errors.MalformedError(f"{key}: directory of {claimed[:20]!r} bytes", key=key)
    document = inflate(data, nbytes, key=key) if compressed else bytes(data)
    try:
        directory = with_full_rows(decode(document, d.Directory))
    except (msgspec.MsgspecError, ValueError) as exc:
        raise errors.MalformedError(f"{key}: directory: {exc}", key=key) from exc
    again = msgspec.json.encode(with_short_rows(directory))
    if document != (again if compressed else again + b" " * (-len(again) % 8)):
        raise errors.MalformedError(f"{key}: the directory is not canonical", key=key)
    return directory


def _frames(
    directory: d.Directory, header: container.Header, *, compressed: bool, key: str
) -> Iterator[tuple[d.StreamRow, Frames]]:
    entries = list(header.entries.values())[2:]
    if [entry.name for entry in entries] != [row.name for row in directory.streams]:
        raise errors.MalformedError(f"{key}: directory and header list different streams", key=key)
    for entry, row in zip(entries, directory.streams, strict=True):
        fits = len(row.stored) == len(row.raw) == len(row.digests)
        fits = fits and (compressed or row.stored == row.raw)
        fits = fits and sum(row.stored) == entry.nbytes
        if not fits or any(not 0 < n <= FRAME for n in row.raw):
            raise errors.MalformedError(f"{key}: frames of {row.name!r} do not add up", key=key)
        yield row, Frames(entry.start, row.stored, row.raw, row.digests)


def _check_streams(
    columns: RowColumns, header: container.Header, streams: Mapping[str, StreamReader], key: str
) -> None:
    """Check that the streams are exactly those of the tensors, each of the right length."""
    sizes = {name: _nbytes(name, units) for name, units in columns.ends.items()}
    arrays: dict[str, tuple[str, tuple[int, ...]]] = {}
    owners = [n for n, kind in enumerate(columns.kinds) if kind.encoding.own_arrays]
    for n in np.flatnonzero(np.isin(columns.kind, owners)).tolist():
        row = columns.rows[n]
        for name, form in columns.encoding(row.name).arrays(row).items():
            if name in sizes or name in arrays:
                raise errors.MalformedError(f"{key}: two streams are named {name!r}", key=key)
            arrays[name] = form
    fits = streams.keys() == sizes.keys() | arrays.keys()
    for name in streams if fits else ():
        entry = header.entries[name]
        form = arrays.get(name, ("U8", (entry.nbytes,)))
        fits = fits and (entry.dtype, entry.shape) == form
        fits = fits and streams[name].nbytes == sizes.get(name, entry.nbytes)
    if not fits:
        raise errors.MalformedError(f"{key}: streams and tensors do not match", key=key)


def _nbytes(name: str, units: int) -> int:
    return (units + 7) // 8 if d.in_bits(name.partition(".")[2]) else units


Range = tuple[int, int]  # first byte, and the byte after the last


def stored_ranges(part: Part, wanted: Mapping[str, Range]) -> list[Range]:
    """Return the ranges of bytes that hold given elements, ascending and apart."""
    return joined(stream.stored(start, stop) for stream, start, stop in _streams(part, wanted))


def check_ranges(part: Part, wanted: Mapping[str, Range]) -> None:
    """Verify every frame that holds given elements."""
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
        if container.in_bits(stream):
            start, stop = start // 8, (stop + 7) // 8
        if count:
            yield reader.streams[container.stream_name(reader.row.bucket, stream)], start, stop
