"""Reader of one tensor's ranges of the streams of a part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltachain import threads as slab
from deltachain.codec.container import Segment, TensorRow, in_bits, stream_name
from deltachain.codec.frames import StreamReader
from deltachain.codec.old_bits import OldBits
from deltachain.errors import MalformedError
from deltachain.kernels import host
from deltachain.types import BITS_DTYPES, Bits, TensorSpec


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

    def array(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the bytes of one of the tensor's own arrays.

        Raises:
            DigestMismatchError: A frame differs from its digest in the directory.
        """
        reader = self.streams[name]
        return np.frombuffer(bytes(reader.read(0, reader.nbytes)), np.uint8)

    def malformed(self, why: str) -> MalformedError:
        """Build the error that refuses this tensor."""
        return MalformedError(f"{self.key}: {self.row.name!r}: {why}", key=self.key)
