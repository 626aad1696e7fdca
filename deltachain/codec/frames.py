"""Byte streams in independent frames of at most 1 MiB, each with its own digest.

A reader verifies and inflates only the frames it needs, also concurrently.
"""

import itertools
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard

from deltachain import threads as slab
from deltachain.codec.container import ReadAt, Segment, TensorRow, in_bits, stream_name
from deltachain.delta import OldBits
from deltachain.errors import DigestMismatchError, MalformedError
from deltachain.format.keys import object_digest
from deltachain.kernels import host
from deltachain.types import BITS_DTYPES, Bits, Buffer, TensorSpec

FRAME: Final = 1 << 20  # largest inflated size of a frame, in bytes
LEVEL: Final = 1  # zstd level of directories, but for those where bytes matter more than time
SMALLEST_LEVELS: Final = ((1 << 12, LEVEL), (1 << 17, 17), (1 << 21, 15))
"""zstd levels of directories where bytes matter more, up to some bytes each; above, ``LEVEL``.
For 50 to 100 KiB, level 15 takes 3 to 10 ms and saves 7 to 13 %; level 17 takes 9 to 33 ms and
saves 1 to 7 % more. Below 4 KiB they save 3 % at most; for 2 MiB, level 15 takes 0.2 s."""

TABLE_LEVEL: Final = 19
"""zstd level of tables of classes, which are few: those of a frame take up to 50 ms."""

STREAM_PARAMETERS: Final[Mapping[str, int]] = {
    "strategy": zstandard.STRATEGY_FAST,
    "min_match": 7,
    "hash_log": 6,
    "window_log": 17,
}
"""zstd parameters of streams, whose matches mostly are noise: the smallest table of matches, and
the longest smallest match. Beside level 1, most streams take 0.84 to 1.0 of the bytes at 1 to 2.9
times the speed; ``gap8`` at 1.2 % is 14 % slower (2026-11, AMD EPYC, geometric gaps)."""

HELD: Final = 16
"""Number of frames cached by each thread: two for each possible stream of one tensor."""


class _ThreadState(threading.local):
    """Frames that a thread holds, and its zstd contexts: expensive to create, not thread-safe."""

    @cached_property
    def frames(self) -> OrderedDict[tuple[int, int], Buffer]:
        return OrderedDict()

    @cached_property
    def documents(self) -> zstandard.ZstdCompressor:
        return zstandard.ZstdCompressor(level=LEVEL, write_content_size=True)

    @cached_property
    def streams(self) -> zstandard.ZstdCompressor:
        parameters = zstandard.ZstdCompressionParameters(**STREAM_PARAMETERS, write_content_size=1)
        return zstandard.ZstdCompressor(compression_params=parameters)

    @cached_property
    def inflater(self) -> zstandard.ZstdDecompressor:
        # After an allocation of this size was freed, glibc keeps the pages of freed frames for the
        # next ones: 1,000 page faults instead of 30,000 while 480 MB of weights are decoded.
        bytes(16 * FRAME)
        return zstandard.ZstdDecompressor()


_local = _ThreadState()
_ids = itertools.count()


@dataclass(frozen=True, slots=True)
class Frames:
    """Offsets, sizes and digests of the frames of one stream."""

    start: int  # offset of the first frame in the object, in bytes
    stored: tuple[int, ...]  # size of each frame in the object, in bytes
    # Inflated size of each frame, in bytes; equal to `stored` without compression.
    raw: tuple[int, ...]
    digests: tuple[str, ...]  # blake3 of the stored bytes of each frame


def deflate(document: Buffer) -> bytes:
    """Compress a document to one zstd frame that declares its content size."""
    return _local.documents.compress(document)


def deflate_directory(document: bytes, *, smallest: bool) -> bytes:
    """Compress a directory to one zstd frame that declares its content size."""
    fitting = (level for most, level in SMALLEST_LEVELS if len(document) <= most)
    level = next(fitting, LEVEL) if smallest else LEVEL
    if level == LEVEL:
        return deflate(document)
    return zstandard.ZstdCompressor(level=level, write_content_size=True).compress(document)


def deflate_stream(data: Buffer) -> bytes:
    """Compress a piece of a stream to one zstd frame that declares its content size."""
    return _local.streams.compress(data)


def largest_frame(nbytes: int) -> int:
    """Return the largest size of a zstd frame of ``nbytes`` bytes, both in bytes."""
    return nbytes + (nbytes >> 8) + 64


def inflate(frame: Buffer, nbytes: int, *, key: str = "") -> bytes:
    """Inflate one zstd frame to exactly ``nbytes`` bytes.

    The size declared by the frame is checked before any memory is allocated for it.
    """
    try:
        claimed = zstandard.frame_content_size(frame)
        if claimed != nbytes:
            raise MalformedError(
                f"{key}: a frame claims {claimed} bytes, expected {nbytes}", key=key
            )
        data = _local.inflater.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as exc:
        raise MalformedError(f"{key}: {exc}", key=key) from exc
    if len(data) != nbytes:
        raise MalformedError(f"{key}: a frame gave {len(data)} bytes, expected {nbytes}", key=key)
    return data


class StreamReader:
    """Reader of ranges of one inflated stream; thread-safe.

    Neighbouring tensors share frames. Each thread caches its latest inflated frames of all streams,
    so that reading tensors in order inflates each frame once.
    """

    def __init__(self, frames: Frames, read_at: ReadAt, *, compressed: bool, key: str) -> None:
        self._frames = frames
        self._read_at = read_at
        self._compressed = compressed
        self._key = key
        self._stored_at = _running(frames.start, frames.stored)
        self._raw_at = _running(0, frames.raw)
        self._id = next(_ids)

    @property
    def nbytes(self) -> int:
        return self._raw_at[-1]

    def read(self, start: int, stop: int) -> Buffer:
        if start == stop:
            return b""
        number = bisect_right(self._raw_at, start) - 1
        pieces: list[Buffer] = []
        for at, end in self.cuts(start, stop):
            base = self._raw_at[number]
            whole = end - at == self._frames.raw[number]
            pieces.append(memoryview(self.frame(number, keep=not whole))[at - base : end - base])
            number += 1
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def stored(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of the object that holds the frames of the bytes ``start:stop``."""
        first, last = bisect_right(self._raw_at, start) - 1, bisect_right(self._raw_at, stop - 1)
        return self._stored_at[first], self._stored_at[last]

    def check_range(self, start: int, stop: int) -> None:
        """Verify the frames of the bytes ``start:stop``, which are not none."""
        first, last = bisect_right(self._raw_at, start) - 1, bisect_right(self._raw_at, stop - 1)
        for number in range(first, last):
            self.check(number)

    def cuts(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Split the range ``start:stop`` at the ends of frames."""
        number = bisect_right(self._raw_at, start) - 1
        while start < stop:
            end = min(stop, self._raw_at[number + 1])
            yield start, end
            start, number = end, number + 1

    def frame(self, number: int, *, keep: bool = True) -> Buffer:
        """Verify and inflate one frame; cache it with ``keep``, since a neighbour may need it."""
        held = _local.frames
        data = held.get((self._id, number))
        if data is None:
            stored = self.check(number)
            raw = self._frames.raw[number]
            data = inflate(stored, raw, key=self._key) if self._compressed else stored
        else:
            del held[self._id, number]  # moved to the end: the most recent
        if keep:
            while len(held) >= HELD:
                held.popitem(last=False)
            held[self._id, number] = data
        return data

    def check(self, number: int) -> Buffer:
        """Verify one frame; return its stored bytes, read-only."""
        stored = memoryview(
            self._read_at(self._stored_at[number], self._frames.stored[number])
        ).toreadonly()
        expected, actual = self._frames.digests[number], object_digest(stored)
        if actual != expected:
            raise DigestMismatchError(
                f"{self._key}: frame {number}", expected=expected, actual=actual, key=self._key
            )
        return stored


def _running(start: int, sizes: tuple[int, ...]) -> list[int]:
    total = [start]
    for size in sizes:
        total.append(total[-1] + size)
    return total


FlatArray: TypeAlias = npt.NDArray[Any]  # a one-dimensional array of any dtype


WITHOUT_REPEATS: Final = frozenset(["class", "dense", "tile"])
"""Streams of coded places, and of weights: they are large, and nothing in them repeats."""


class BytePlane(NamedTuple):
    """One byte of every element."""

    values: Bits  # unsigned integers, shape `(n,)`
    k: int  # number of the byte in each element, 0 for the lowest


StreamPiece: TypeAlias = FlatArray | BytePlane
"""Bytes, booleans of a stream of bits, or a byte plane, which is split when it is read."""


class StoredFrame(NamedTuple):
    """One frame as stored in a part: its bytes, their inflated size, and their blake3."""

    stored: Buffer
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class StreamContent:
    """Content of one stream, not yet compressed. Frames may be made by several threads."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Sequence[StreamPiece]
    ends: Sequence[int]  # elements up to the end of each piece
    in_bits: bool
    sizes: tuple[int, ...]  # inflated sizes of the frames, in bytes

    @classmethod
    def join(
        cls,
        name: str,
        pieces: Iterable[StreamPiece],
        *,
        dtype: str = "U8",
        shape: tuple[int, ...] | None = None,
        in_bits: bool = False,
    ) -> "StreamContent":
        """Return the content of all pieces; the shape is one-dimensional by default."""
        filled = [piece for piece in pieces if _size(piece)]
        ends = list(accumulate(map(_size, filled)))
        size = ends[-1] if ends else 0
        nbytes = -(-size // 8) if in_bits else size
        sizes = tuple(min(FRAME, nbytes - at) for at in range(0, nbytes, FRAME))
        return cls(name, dtype, (nbytes,) if shape is None else shape, filled, ends, in_bits, sizes)

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    def frame(self, number: int, *, compress: bool) -> StoredFrame:
        """Return one frame, compressed or as it is."""
        start = number * FRAME
        raw = self.read(start, start + self.sizes[number]).data
        stored = self._deflate(raw) if compress else raw
        return StoredFrame(stored, raw.nbytes, object_digest(stored))

    def _deflate(self, raw: memoryview) -> bytes:
        stream = self.name.partition(".")[2].partition(".")[0]
        if stream == "class":  # 0.2 to 0.6 of the bytes, at 10 to 20 MB/s
            table = zstandard.ZstdCompressor(level=TABLE_LEVEL, write_content_size=True)
            return table.compress(raw)
        if stream in WITHOUT_REPEATS:
            return deflate_stream(raw)
        # Where changes repeat, as in columns that change in every row, the larger table of matches
        # of level 1 takes down to a hundredth of the bytes; else it takes up to a tenth more.
        return min(deflate_stream(raw), deflate(raw), key=len)

    def read(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Return the bytes ``start:stop``; they share memory with a piece that has all of them."""
        if self.in_bits:
            flags = self._join(8 * start, min(8 * stop, self.ends[-1]), np.bool_)
            return np.packbits(flags, bitorder="little")
        return self._join(start, stop, np.uint8)

    def _join(self, start: int, stop: int, dtype: Any) -> npt.NDArray[Any]:  # noqa: ANN401
        first, last = bisect_right(self.ends, start), bisect_left(self.ends, stop)
        pieces = list(self.pieces[first : last + 1])
        pieces[-1] = _part(pieces[-1], 0, stop - self.ends[last] + _size(pieces[-1]))
        begin = self.ends[first - 1] if first else 0
        pieces[0] = _part(pieces[0], start - begin, _size(pieces[0]))
        plain = [piece for piece in pieces if not isinstance(piece, BytePlane)]
        if len(plain) == len(pieces):
            return np.concatenate(plain) if len(plain) > 1 else np.ascontiguousarray(plain[0])
        out: npt.NDArray[Any] = np.empty(stop - start, dtype)
        at = 0
        for piece in pieces:
            there = out[at : at + _size(piece)]
            if isinstance(piece, BytePlane):
                host.copy_plane_(there, piece.values, piece.k)
            else:
                there[:] = piece
            at += there.size
        return out


def _size(piece: StreamPiece) -> int:
    return int(piece.values.size if isinstance(piece, BytePlane) else piece.size)


def _part(piece: StreamPiece, low: int, high: int) -> StreamPiece:
    if isinstance(piece, BytePlane):
        return BytePlane(piece.values[low:high], piece.k)
    return piece[low:high]


@dataclass(frozen=True, slots=True)
class OwnArray:
    """A safetensors array that belongs to one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]


@dataclass(slots=True)
class BucketWriter:
    """Collector of the stream contents of a bucket's tensors.

    Attributes:
        pieces: Contents by stream, in the order of the tensors.
        arrays: Arrays that belong to single tensors.
        notes: What an encoding keeps of the tensors before.
        old: Consecutive elements of the tensor before the change, all changed ones among them, for
            an encoding that needs them; ``None`` if the caller has none.
    """

    pieces: dict[str, list[StreamPiece]] = field(default_factory=dict)
    arrays: list[OwnArray] = field(default_factory=list)
    notes: dict[Any, Any] = field(default_factory=dict)
    old: OldBits | None = None

    def lengths(self) -> dict[str, int]:
        """Return the number of pieces of each stream."""
        return {stream: len(pieces) for stream, pieces in self.pieces.items()}

    def cut(self, lengths: Mapping[str, int]) -> None:
        """Remove the pieces that were put since :meth:`lengths` returned these."""
        for stream, pieces in self.pieces.items():
            del pieces[lengths.get(stream, 0) :]

    def extend(self, other: "BucketWriter") -> None:
        """Append all streams of another writer."""
        for stream, pieces in other.pieces.items():
            self.pieces.setdefault(stream, []).extend(pieces)

    def put(self, stream: str, piece: FlatArray) -> None:
        """Append bytes to a stream, or booleans to a stream of bits."""
        self.pieces.setdefault(stream, []).append(piece)

    def put_planes(self, stream: str, values: Bits) -> None:
        """Append byte ``k`` of every element to ``stream.k``, since byte planes compress better."""
        for k in range(values.itemsize):
            self.pieces.setdefault(f"{stream}.{k}", []).append(BytePlane(values, k))

    def put_array(self, name: str, dtype: str, shape: tuple[int, ...], values: FlatArray) -> None:
        """Store an array as a separate entry."""
        self.arrays.append(OwnArray(name, dtype, shape, values.view(np.uint8)))


@dataclass(frozen=True, slots=True)
class TensorReader:
    """Reader of consecutive segments of a tensor; digests are verified, values still untrusted.

    Attributes:
        spec: Spec of the tensor.
        row: Row of the tensor in the directory.
        segments: Segments to read: all of the tensor, or those near some elements.
        is_part: Whether segments may be left out.
        key: Key of the part, for errors.
        starts: Start of the segments in each stream of the bucket, in the stream's unit.
        lengths: Length of the segments in each stream, in the stream's unit.
        ends: Length of each stream of the part, by full name, in the stream's unit.
        streams: Readers of all streams of the part, by full name.
        old: Bits before the change, for encodings that need them.
        near: Range of elements that are wanted of arrays of the tensor's own; ``None`` for all.
    """

    spec: TensorSpec
    row: TensorRow
    segments: tuple[Segment, ...]
    is_part: bool
    key: str
    starts: Mapping[str, int]
    lengths: Mapping[str, int]
    ends: Mapping[str, int]
    streams: Mapping[str, StreamReader]
    old: OldBits | None = None
    near: tuple[int, int] | None = None

    @property
    def table(self) -> npt.NDArray[np.int64]:
        """Segments as ``(n, 6)`` rows of start, length, nnz, gaps, exceptions and wide."""
        rows = [(s.start, s.length, s.nnz, s.gaps, s.exceptions, s.wide) for s in self.segments]
        return np.array(rows, np.int64).reshape(-1, 6)

    def units(self, stream: str) -> npt.NDArray[np.uint8]:
        """Return the tensor's range of one stream: bytes, or one byte of 0 or 1 for each bit.

        Raises:
            DigestMismatchError: A frame differs from its digest in the directory.
            MalformedError: The padding bits after the last bit are not zero.
        """
        count, at = self.lengths[stream], self.starts[stream]
        if in_bits(stream):
            packed, first = self.packed(stream)
            return np.unpackbits(packed, bitorder="little")[first : first + count]
        name = stream_name(self.row.bucket, stream)
        return np.frombuffer(self.streams[name].read(at, at + count) if count else b"", np.uint8)

    def packed(self, stream: str) -> tuple[npt.NDArray[np.uint8], int]:
        """Return the bytes of the tensor's range of a stream of bits, and the range's first bit.

        Raises:
            DigestMismatchError: A frame differs from its digest in the directory.
            MalformedError: The padding bits after the last bit are not zero.
        """
        at, end = self.starts[stream], self.starts[stream] + self.lengths[stream]
        name = stream_name(self.row.bucket, stream)
        if at == end:
            return np.frombuffer(b"", np.uint8), 0
        data = np.frombuffer(self.streams[name].read(at // 8, (end + 7) // 8), np.uint8)
        if end == self.ends[name] and end % 8 and int(data[-1]) >> end % 8:
            raise MalformedError(f"{self.key}: {name!r} is not filled up with zeros", key=self.key)
        return data, at % 8

    def planes(self, stream: str, width: int) -> Bits:
        """Join elements of ``width`` bytes from the planes ``stream.0``, ``stream.1``, ...

        Elements are joined frame by frame, while the frames are in cache, in new memory.

        Raises:
            DigestMismatchError: A frame differs from its digest in the directory.
        """
        names = [f"{stream}.{k}" for k in range(width)]
        readers = [self.streams.get(stream_name(self.row.bucket, name)) for name in names]
        begins = [self.starts[name] for name in names]
        elements = slab.empty(self.lengths[names[0]], BITS_DTYPES[width])
        first = readers[0]
        for start, stop in first.cuts(begins[0], begins[0] + elements.size) if first else ():
            at, end = start - begins[0], stop - begins[0]
            planes = [
                np.frombuffer(reader.read(begin + at, begin + end), np.uint8)
                for reader, begin in zip(readers, begins, strict=True)
                if reader is not None
            ]
            host.join_planes(planes, elements[at:end])
        return elements

    def array(self, name: str, start: int = 0, stop: int | None = None) -> npt.NDArray[np.uint8]:
        """Return the bytes ``start:stop`` of one of the tensor's own arrays.

        Raises:
            DigestMismatchError: A frame differs from its digest in the directory.
        """
        reader = self.streams[name]
        data = reader.read(start, reader.nbytes if stop is None else stop)
        return np.frombuffer(bytes(data), np.uint8)

    def malformed(self, why: str) -> MalformedError:
        """Build the error that refuses this tensor."""
        return MalformedError(f"{self.key}: {self.row.name!r}: {why}", key=self.key)
