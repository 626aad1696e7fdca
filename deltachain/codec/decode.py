"""Decoding of a part to deltas; all input is untrusted until verified (FORMAT.md 3 and 4)."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from deltachain import errors
from deltachain.codec import container as d
from deltachain.codec.container import (
    Entry,
    Header,
    ReadAt,
    in_bits,
    read_header,
    stream_name,
    write_header,
)
from deltachain.codec.encode import FORMAT
from deltachain.codec.encodings import ENCODINGS, Encoding, TensorReader
from deltachain.codec.frames import FRAME, Frames, StreamReader, inflate
from deltachain.codec.rows import check_digests, with_full_rows, with_short_rows
from deltachain.delta import OldBits, TensorDelta
from deltachain.format.documents import decode
from deltachain.format.keys import object_digest
from deltachain.types import Buffer, TensorSpec


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A row with its segments, and its start and length in each stream of its bucket."""

    spec: TensorSpec
    row: d.TensorRow
    encoding: Encoding
    segments: tuple[d.Segment, ...]
    starts: Mapping[str, int]
    lengths: Mapping[str, int]


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
    """

    def __init__(self, read_at: ReadAt, nbytes: int, *, key: str = "") -> None:
        self.key = key
        self._source = _Source(b"")
        header = read_header(read_at, nbytes, key=key)
        self.compressed = _check_metadata(header, key)
        self.digest = _check_front(header, read_at, key)
        self._front_nbytes = header.entries["digest"].stop
        self.directory = _read_directory(header, read_at, compressed=self.compressed, key=key)
        self._tensors = _place(self.directory, compressed=self.compressed, key=key)
        self.rows = MappingProxyType({name: t.row for name, t in self._tensors.items()})
        self._streams = {
            row.name: StreamReader(frames, read_at, compressed=self.compressed, key=key)
            for row, frames in _frames(self.directory, header, compressed=self.compressed, key=key)
        }
        self._ends = _bucket_streams(self._tensors.values())
        _check_streams(self._tensors, header, self._streams, self._ends, key)

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

    @property
    def front_nbytes(self) -> int:
        """Bytes before the streams: header, directory and their digest."""
        return self._front_nbytes

    @property
    def nnz(self) -> int:
        return sum(row.nnz for row in self.rows.values())

    def verify(self) -> None:
        """Verify every byte of the object; decode what needs no old bits."""
        for row in self.directory.streams:
            for number in range(len(row.stored)):
                self._streams[row.name].check(number)
        for name in self._tensors:
            if not self.needs_old(name):
                self.read(name)

    def __iter__(self) -> Iterator[TensorDelta]:
        return (self.read(name) for name in self._tensors)

    def read(
        self, name: str, near: tuple[int, int] | None = None, *, old: OldBits | None = None
    ) -> TensorDelta:
        """Decode and validate one tensor.

        Segments without elements in the range ``near`` of flat indices are not read, and their
        elements may be missing in the result; elements outside may be in it. ``old`` has the bits
        of all elements in ``near``, for encodings that need them.
        """
        try:
            delta = self._decode(self._tensors[name], near, old)
            if self._tensors[name].encoding.checked:
                return delta
            return delta.validate(in_part=near is not None)
        except errors.MalformedError as exc:
            if exc.key:
                raise
            raise errors.MalformedError(f"{self.key}: {exc.args[0]}", key=self.key) from exc

    def needs_old(self, name: str) -> bool:
        """Return whether :meth:`read` needs the old bits of a tensor."""
        return self._tensors[name].encoding.decodes_with_old(self.rows[name])

    def reader(
        self, name: str, near: tuple[int, int] | None = None, *, old: OldBits | None = None
    ) -> TensorReader:
        """Return a reader of the segments of a tensor; see :meth:`read`."""
        tensor = self._tensors[name]
        kept, starts, lengths = tensor.segments, tensor.starts, tensor.lengths
        if near is not None and kept:
            first, last = d.segments_near(kept, *near)
            if (first, last) != (0, len(kept)):
                before = tensor.encoding.streams(tensor.row, kept[:first])
                shared = tensor.encoding.shared
                starts = {n: at + before[n] * (n not in shared) for n, at in starts.items()}
                kept = kept[first:last]
                lengths = tensor.encoding.streams(tensor.row, kept)
        return TensorReader(
            spec=tensor.spec,
            row=tensor.row,
            segments=kept,
            is_part=near is not None,
            key=self.key,
            starts=starts,
            lengths=lengths,
            ends=self._ends,
            streams=self._streams,
            old=old,
        )

    def _decode(
        self, tensor: _Tensor, near: tuple[int, int] | None, old: OldBits | None
    ) -> TensorDelta:
        reader = self.reader(tensor.spec.name, near, old=old)
        expected = sum(s.nnz for s in reader.segments) if tensor.segments else tensor.row.nnz
        delta = tensor.encoding.decode(reader)
        is_part = old is not None and old.held is not None  # some tiles may be of other ranks
        fits = delta.nnz == expected or (is_part and delta.nnz < expected)
        if delta.spec != tensor.spec or not fits:
            raise reader.malformed(f"decodes to {delta.nnz} elements of {expected}")
        return delta


def _check_metadata(header: Header, key: str) -> bool:
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


def _entry(header: Header, name: str, position: int, key: str) -> Entry:
    names = list(header.entries)
    if len(names) <= position or names[position] != name:
        raise errors.MalformedError(f"{key}: entry {position} is not {name!r}", key=key)
    entry = header.entries[name]
    if (entry.dtype, entry.shape) != ("U8", (entry.nbytes,)):
        raise errors.MalformedError(f"{key}: {name!r} is {entry.dtype}{entry.shape}", key=key)
    return entry


def _check_front(header: Header, read_at: ReadAt, key: str) -> str:
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
    if front[: header.nbytes] != write_header(header.metadata, entries):
        raise errors.MalformedError(f"{key}: the header is not canonical", key=key)
    return actual


def _read_directory(header: Header, read_at: ReadAt, *, compressed: bool, key: str) -> d.Directory:
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


def _place(directory: d.Directory, *, compressed: bool, key: str) -> dict[str, _Tensor]:
    """Determine and check each tensor's segments and its start in every stream."""
    try:
        segments = d.segments_of(directory.segments)
    except ValueError as exc:
        raise errors.MalformedError(f"{key}: {exc}", key=key) from exc
    tensors: dict[str, _Tensor] = {}
    reached: dict[int, dict[str, int]] = {}
    for row in directory.tensors:
        if row.name in tensors:
            raise errors.MalformedError(f"{key}: two rows for tensor {row.name!r}", key=key)
        encoding = ENCODINGS.get(row.encoding, key=key)
        if compressed and encoding.own_arrays:
            raise errors.MalformedError(
                f"{key}: {row.name!r}: encoding {row.encoding!r} in a compressed part", key=key
            )
        spec = _check_row(row, encoding, key)
        own = encoding.own_arrays
        mine = () if own else _take_segments(row, spec.numel, encoding, segments, key)
        at = reached.setdefault(row.bucket, {})
        lengths = {} if own else encoding.streams(row, mine)
        starts = {name: at.get(name, 0) for name in lengths}
        tensors[row.name] = _Tensor(spec, row, encoding, mine, starts, lengths)
        for name, length in lengths.items():
            at[name] = at.get(name, 0) + length
    if next(segments, None) is not None:
        raise errors.MalformedError(f"{key}: more segments than the tensors have", key=key)
    try:
        check_digests(directory.tensors)
    except errors.ConfigError as exc:
        raise errors.MalformedError(f"{key}: {exc}", key=key) from exc
    return tensors


def _check_row(row: d.TensorRow, encoding: Encoding, key: str) -> TensorSpec:
    try:
        spec = row.spec
    except errors.ConfigError as exc:
        raise errors.MalformedError(f"{key}: {exc}", key=key) from exc
    fits = not encoding.own_arrays or row.gap == row.bucket == row.segments == 0
    if not fits or not encoding.fits_row(row, spec.numel):
        raise _inconsistent(row, key)
    return spec


def _take_segments(
    row: d.TensorRow, numel: int, encoding: Encoding, segments: Iterator[d.Segment], key: str
) -> tuple[d.Segment, ...]:
    """Take the segments of one row from the iterator.

    Each is checked before the next is created, so that malicious columns take no memory.
    """
    mine: list[d.Segment] = []
    at = 0
    while len(mine) < row.segments:
        segment = next(segments, None)
        if segment is None or segment.start < at or not d.is_inside(segment, numel):
            raise _inconsistent(row, key)
        if not encoding.fits_segment(row, segment):
            raise _inconsistent(row, key)
        mine.append(segment)
        at = segment.start + segment.length
    if row.nnz != sum(s.nnz for s in mine):
        raise _inconsistent(row, key)
    return tuple(mine)


def _inconsistent(row: d.TensorRow, key: str) -> errors.MalformedError:
    return errors.MalformedError(f"{key}: inconsistent row of tensor {row.name!r}", key=key)


def _frames(
    directory: d.Directory, header: Header, *, compressed: bool, key: str
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
    tensors: Mapping[str, _Tensor],
    header: Header,
    streams: Mapping[str, StreamReader],
    ends: Mapping[str, int],
    key: str,
) -> None:
    """Check that the streams are exactly those of the tensors, each of the right length."""
    sizes = {name: _nbytes(name, units) for name, units in ends.items()}
    arrays: dict[str, tuple[str, tuple[int, ...]]] = {}
    for tensor in tensors.values():
        own = tensor.encoding.arrays(tensor.row) if tensor.encoding.own_arrays else {}
        for name, form in own.items():
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


def _bucket_streams(tensors: Iterable[_Tensor]) -> dict[str, int]:
    ends: dict[str, int] = {}
    for tensor in tensors:
        for stream, units in tensor.lengths.items():
            end = tensor.starts[stream] + units
            if end:
                ends[d.stream_name(tensor.row.bucket, stream)] = end
    return ends


Range = tuple[int, int]
"""First byte, and the byte after the last."""


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
        if in_bits(stream):
            start, stop = start // 8, (stop + 7) // 8
        if count:
            yield reader.streams[stream_name(reader.row.bucket, stream)], start, stop
