"""The bytes of one part to deltas, every byte hostile until proven (FORMAT.md 3 and 4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import msgspec
import numpy as np
import numpy.typing as npt

from deltachain.codec import directory as d
from deltachain.codec.container import Entry, Header, ReadAt, read_header, reader_of, write_header
from deltachain.codec.encode import FORMAT
from deltachain.codec.frames import FRAME, Frames, StreamReader, inflate
from deltachain.delta import ABSOLUTE, STEP, TensorDelta
from deltachain.errors import DigestMismatchError, MalformedError, UnsupportedFormatError
from deltachain.format.digest import object_digest
from deltachain.kernels import host
from deltachain.kernels.reference import SplitSteps
from deltachain.types import BITS_DTYPES, Bits, Buffer, Indices, TensorSpec


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A row, its segments, where it begins in each stream of its bucket, and how far it goes."""

    row: d.TensorRow
    segments: tuple[d.Segment, ...]
    at: Mapping[str, int]
    lengths: Mapping[str, int]


class Part:
    """One payload object, opened: its directory is proven, its tensors are read on demand.

    Only the frames that a tensor needs are read, verified and inflated. Not for use by several
    threads at once; opening it twice is cheap.

    Attributes:
        key: As given.
        digest: blake3 of the front of the file, as stored in it.
        directory: What it says of its tensors and streams.
        rows: The rows of the directory, by tensor name.

    Args:
        read_at: Reads a range of the object.
        nbytes: Length of the object.
        key: Names the object in errors.

    Raises:
        MalformedError: It violates FORMAT.md.
        UnsupportedFormatError: It was written by a newer deltachain.
        DigestMismatchError: The front of the file is not what its digest says.
    """

    def __init__(self, read_at: ReadAt, nbytes: int, *, key: str = "") -> None:
        self.key = key
        header = read_header(read_at, nbytes, key=key)
        self.compressed = _check_metadata(header, key)
        self.digest = _check_front(header, read_at, key)
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
    def from_bytes(cls, data: Buffer, *, key: str = "") -> Part:
        """Open an object that is in memory or mapped."""
        return cls(reader_of(data), len(data), key=key)

    @property
    def nnz(self) -> int:
        """Elements stored."""
        return sum(row.nnz for row in self.directory.tensors)

    def verify(self) -> None:
        """Prove every byte of the object.

        Raises:
            DigestMismatchError: A frame differs from the one the directory names.
            MalformedError: A tensor does not decode.
        """
        for row in self.directory.streams:
            for number in range(len(row.stored)):
                self._streams[row.name].check(number)
        for name in self._tensors:
            self.read(name)

    def __iter__(self) -> Iterator[TensorDelta]:
        return (self.read(name) for name in self._tensors)

    def read(self, name: str) -> TensorDelta:
        """Decode one tensor; the result keeps every promise of :class:`TensorDelta`.

        Raises:
            DigestMismatchError: A frame differs from the one the directory names.
            MalformedError: The streams contradict the directory.
        """
        try:
            return self._decode(self._tensors[name]).validate()
        except MalformedError as exc:
            if exc.key:
                raise
            raise MalformedError(f"{self.key}: {exc.args[0]}", key=self.key) from exc

    def _decode(self, tensor: _Tensor) -> TensorDelta:
        spec, encoding = tensor.row.spec, tensor.row.encoding
        if encoding in d.UNCOMPRESSED:
            return self._read_raw(tensor.row, spec)
        if encoding == d.DENSE:
            return _dense(spec, tensor.segments, self._planes(tensor, "dense", spec.itemsize))
        indices = self._indices(tensor)
        if encoding == d.OVERWRITE:
            values, absolute = self._planes(tensor, "value", spec.itemsize), ABSOLUTE
        else:
            values, absolute = self._steps(tensor, spec.itemsize), STEP
        return TensorDelta(spec=spec, indices=indices, values=values, absolute=absolute)

    def _units(self, tensor: _Tensor, stream: str) -> npt.NDArray[np.uint8]:
        """A tensor's share of one stream: bytes, or one byte of 0 or 1 for each bit."""
        count, at = tensor.lengths[stream], tensor.at[stream]
        name = d.stream_name(tensor.row.bucket, stream)
        if not count:
            return np.empty(0, np.uint8)
        if not d.in_bits(stream):
            return np.frombuffer(self._streams[name].read(at, at + count), np.uint8)
        packed = self._streams[name].read(at // 8, (at + count + 7) // 8)
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")[at % 8 :]
        if at + count == self._ends[name] and np.any(bits[count:]):
            raise MalformedError(f"{self.key}: {name!r} is not filled up with zeros", key=self.key)
        return bits[:count]

    def _planes(self, tensor: _Tensor, stream: str, width: int) -> Bits:
        """A tensor's elements out of their byte planes, frame by frame while they are in cache."""
        names = [f"{stream}.{k}" for k in range(width)]
        if width == 1:
            return self._units(tensor, names[0])
        readers = [self._streams.get(d.stream_name(tensor.row.bucket, name)) for name in names]
        begins = [tensor.at[name] for name in names]
        elements = np.empty(tensor.lengths[names[0]], BITS_DTYPES[width])
        first = readers[0]
        for start, stop in first.cuts(begins[0], begins[0] + elements.size) if first else ():
            at, end = start - begins[0], stop - begins[0]
            planes = [
                np.frombuffer(reader.read(begin + at, begin + end), np.uint8)
                for reader, begin in zip(readers, begins, strict=True)
                if reader is not None
            ]
            join_planes(planes, elements[at:end])
        return elements

    def _indices(self, tensor: _Tensor) -> Indices:
        if tensor.row.gap == 1:
            gaps: Bits = self._units(tensor, "gap8")
        else:
            gaps = self._planes(tensor, "gap16", 2)
        out = np.empty(tensor.row.nnz, np.int64)
        at, filled = 0, 0
        for segment in tensor.segments:
            mine = gaps[at : at + segment.gaps]
            offsets = host.decode_gaps(mine)
            fits = offsets.size == segment.nnz and offsets[-1] < segment.length
            if not fits or mine[-1] == np.iinfo(mine.dtype).max:
                raise MalformedError(
                    f"{self.key}: {tensor.row.name!r}: gaps leave the segment", key=self.key
                )
            out[filled : filled + segment.nnz] = offsets
            out[filled : filled + segment.nnz] += segment.start
            at, filled = at + segment.gaps, filled + segment.nnz
        return out

    def _steps(self, tensor: _Tensor, width: int) -> Bits:
        split = SplitSteps(
            negative=self._units(tensor, "sign").astype(np.bool_),
            exception=self._units(tensor, "exception").astype(np.bool_),
            magnitude=self._units(tensor, "magnitude"),
            wide=self._planes(tensor, "wide", width),
        )
        if not _add_up(split, tensor.segments) or not _is_canonical(split):
            raise MalformedError(
                f"{self.key}: {tensor.row.name!r}: steps are not canonical", key=self.key
            )
        return host.join_steps(split)

    def _read_raw(self, row: d.TensorRow, spec: TensorSpec) -> TensorDelta:
        if row.encoding == d.PLAIN:
            values = self._array(spec.name).view(spec.bits_dtype)
            return TensorDelta.dense(spec, values)
        indices = self._array(f"{spec.name}.indices")
        wide = indices.view("<i4" if spec.numel < 1 << 31 else "<i8").astype(np.int64)
        values = self._array(f"{spec.name}.values").view(spec.bits_dtype)
        return TensorDelta(spec=spec, indices=wide, values=values, absolute=ABSOLUTE)

    def _array(self, stream: str) -> npt.NDArray[np.uint8]:
        reader = self._streams[stream]
        return np.frombuffer(bytes(reader.read(0, reader.nbytes)), np.uint8)


def join_planes(planes: Sequence[npt.NDArray[np.uint8]], out: Bits) -> None:
    """Put little-endian elements together from their bytes, plane by plane, into ``out``."""
    top = len(planes) - 1
    np.multiply(planes[top], out.dtype.type(1 << (8 * top)), out=out, dtype=out.dtype)
    np.bitwise_or(out, planes[0], out=out)
    for k in range(1, top):
        np.bitwise_or(out, planes[k].astype(out.dtype) << out.dtype.type(8 * k), out=out)


def _add_up(split: SplitSteps, segments: tuple[d.Segment, ...]) -> bool:
    """Whether each segment has as many exceptions and wide steps as it says."""
    escaped = split.magnitude == 255
    at = short = 0
    for s in segments:
        exceptions = int(np.count_nonzero(split.exception[at : at + s.nnz]))
        wide = int(np.count_nonzero(escaped[short : short + s.exceptions]))
        if (exceptions, wide) != (s.exceptions, s.wide):
            return False
        at, short = at + s.nnz, short + s.exceptions
    return True


def _is_canonical(split: SplitSteps) -> bool:
    """Whether there is exactly one way to write these steps, and this is it."""
    escaped = split.magnitude == 255
    if bool(np.any(split.magnitude < 2)):
        return False
    if not split.wide.size and split.wide.itemsize > 1:
        return True
    negative = split.negative[split.exception]
    if split.wide.itemsize == 1:  # a magnitude beyond the sign's range is a step of the other sign
        return not bool(np.any(split.magnitude > negative + np.uint8(127)))
    again = host.split_steps(split.wide)
    if again.magnitude.size != split.wide.size or bool(np.any(again.magnitude != 255)):
        return False
    return np.array_equal(again.negative, negative[escaped])


def _dense(spec: TensorSpec, segments: tuple[d.Segment, ...], values: Bits) -> TensorDelta:
    """Dense when the segments cover the tensor; else absolute bits of the windows they cover."""
    if values.size == spec.numel:
        return TensorDelta.dense(spec, values)
    windows = [np.arange(s.start, s.start + s.length) for s in segments]
    indices = np.concatenate([np.empty(0, np.int64), *windows])
    return TensorDelta(spec=spec, indices=indices, values=values, absolute=ABSOLUTE)


def _check_metadata(header: Header, key: str) -> bool:
    """Format number and compression; whether streams are compressed."""
    version = header.metadata.get("deltachain")
    if version is None:
        raise MalformedError(f"{key}: not a deltachain part: no format number", key=key)
    if version != FORMAT:
        raise UnsupportedFormatError(f"{key}: format {version}, this reads {FORMAT}", key=key)
    compression = header.metadata.get("compression")
    if compression not in ("zstd", "none"):
        raise UnsupportedFormatError(f"{key}: compression {compression!r}", key=key)
    return compression == "zstd"


def _entry(header: Header, name: str, position: int, key: str) -> Entry:
    names = list(header.entries)
    if len(names) <= position or names[position] != name:
        raise MalformedError(f"{key}: entry {position} is not {name!r}", key=key)
    entry = header.entries[name]
    if (entry.dtype, entry.shape) != ("U8", (entry.nbytes,)):
        raise MalformedError(f"{key}: {name!r} is {entry.dtype}{entry.shape}", key=key)
    return entry


def _check_front(header: Header, read_at: ReadAt, key: str) -> str:
    """Prove header and directory against the digest stored behind them."""
    _entry(header, "directory", 0, key)
    entry = _entry(header, "digest", 1, key)
    if entry.nbytes != 32:
        raise MalformedError(f"{key}: digest of {entry.nbytes} bytes", key=key)
    expected = bytes(read_at(entry.start, 32)).hex()
    front = read_at(0, entry.start)
    actual = object_digest(front)
    if actual != expected:
        raise DigestMismatchError(f"{key}: directory", expected=expected, actual=actual, key=key)
    entries = [(e.name, e.dtype, e.shape, e.nbytes) for e in header.entries.values()]
    if front[: header.nbytes] != write_header(header.metadata, entries):
        raise MalformedError(f"{key}: the header is not canonical", key=key)
    return actual


def _read_directory(header: Header, read_at: ReadAt, *, compressed: bool, key: str) -> d.Directory:
    entry = _entry(header, "directory", 0, key)
    data = read_at(entry.start, entry.nbytes)
    claimed = header.metadata.get("directory_nbytes", "")
    nbytes = int(claimed) if claimed.isdecimal() and len(claimed) < 10 else -1
    fits = nbytes >= 0 and str(nbytes) == claimed and (compressed or nbytes == entry.nbytes)
    if not fits or nbytes > d.MAX_DIRECTORY:
        raise MalformedError(f"{key}: directory of {claimed[:20]!r} bytes", key=key)
    document = inflate(data, nbytes, key=key) if compressed else bytes(data)
    try:
        directory = d.DECODER.decode(document)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise MalformedError(f"{key}: directory: {exc}", key=key) from exc
    again = msgspec.json.encode(directory)
    if document != (again if compressed else again + b" " * (-len(again) % 8)):
        raise MalformedError(f"{key}: the directory is not canonical", key=key)
    return directory


def _place(directory: d.Directory, *, compressed: bool, key: str) -> dict[str, _Tensor]:
    """Give each tensor its segments and its place in every stream, checking both."""
    try:
        segments = d.segments_of(directory.segments)
    except ValueError as exc:
        raise MalformedError(f"{key}: {exc}", key=key) from exc
    tensors: dict[str, _Tensor] = {}
    reached: dict[int, dict[str, int]] = {}
    for row in directory.tensors:
        if row.name in tensors:
            raise MalformedError(f"{key}: {row.name!r} has two rows", key=key)
        if compressed and row.encoding in d.UNCOMPRESSED:
            raise MalformedError(f"{key}: {row.name!r} is {row.encoding}, compressed", key=key)
        mine = d.take_segments(row, segments, key)
        at = reached.setdefault(row.bucket, {})
        lengths = {} if row.encoding in d.UNCOMPRESSED else d.stream_lengths(row, mine)
        begins = {name: at.get(name, 0) for name in lengths}
        tensors[row.name] = _Tensor(row, mine, begins, lengths)
        for name, length in lengths.items():
            at[name] = at.get(name, 0) + length
    if next(segments, None) is not None:
        raise MalformedError(f"{key}: segments that are no tensor's", key=key)
    return tensors


def _frames(
    directory: d.Directory, header: Header, *, compressed: bool, key: str
) -> Iterator[tuple[d.StreamRow, Frames]]:
    """Pair every stream row with its entry, in file order."""
    entries = list(header.entries.values())[2:]
    if [entry.name for entry in entries] != [row.name for row in directory.streams]:
        raise MalformedError(f"{key}: the directory lists other streams than the header", key=key)
    for entry, row in zip(entries, directory.streams, strict=True):
        fits = len(row.stored) == len(row.raw) == len(row.digests)
        fits = fits and (compressed or row.stored == row.raw)
        fits = fits and sum(row.stored) == entry.nbytes
        if not fits or any(not 0 < n <= FRAME for n in row.raw):
            raise MalformedError(f"{key}: frames of {row.name!r} do not add up", key=key)
        yield row, Frames(entry.start, row.stored, row.raw, row.digests)


def _check_streams(
    tensors: Mapping[str, _Tensor],
    header: Header,
    streams: Mapping[str, StreamReader],
    ends: Mapping[str, int],
    key: str,
) -> None:
    """Every stream is there, as long as its tensors need it, and nobody's stream is there."""
    sizes = {name: (units + 7) // 8 if d.in_bits(name) else units for name, units in ends.items()}
    arrays: dict[str, tuple[str, tuple[int, ...]]] = {}
    for tensor in tensors.values():
        for name, dtype, shape in d.arrays_of(tensor.row):
            if name in sizes or name in arrays:
                raise MalformedError(f"{key}: {name!r} is two streams", key=key)
            arrays[name] = dtype, shape
    fits = streams.keys() == sizes.keys() | arrays.keys()
    for name in streams if fits else ():
        entry = header.entries[name]
        form = arrays.get(name, ("U8", (entry.nbytes,)))
        fits = fits and (entry.dtype, entry.shape) == form
        fits = fits and streams[name].nbytes == sizes.get(name, entry.nbytes)
    if not fits:
        raise MalformedError(f"{key}: streams and tensors do not match", key=key)


def _bucket_streams(tensors: Iterable[_Tensor]) -> dict[str, int]:
    """Length of every stream that is not empty, in its unit."""
    ends: dict[str, int] = {}
    for tensor in tensors:
        for stream, units in tensor.lengths.items():
            end = tensor.at[stream] + units
            if end:
                ends[d.stream_name(tensor.row.bucket, stream)] = end
    return ends
