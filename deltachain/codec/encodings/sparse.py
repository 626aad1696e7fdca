"""Encodings ``step`` and ``overwrite``, and their base: changed elements located by gaps."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from deltachain.codec.container import SEGMENT, Segment, TensorRow
from deltachain.codec.encodings.base import EncodedTensor, Encoding
from deltachain.codec.frames import BucketWriter, TensorReader
from deltachain.delta import ABSOLUTE, STEP, TensorDelta
from deltachain.errors import ConfigError
from deltachain.kernels import host
from deltachain.kernels.arrays import Changes, StepStreams
from deltachain.types import Bits, Indices, TensorSpec

WIDE_GAPS_BELOW: Final = 0.003
"""Density below which 2-byte gaps in byte planes are smaller than 1-byte gaps (codec study 3d)."""


class SparseEncoding(Encoding):
    """An encoding with indices stored as gaps; a subclass stores the values.

    Streams ``gap8``, or ``gap16.0`` and ``gap16.1``: the distances between changed elements.

    Attributes:
        sparse: True for every subclass; see :class:`Encoding`.
        has_exceptions: Whether segments have the counts ``exceptions`` and ``wide``; otherwise both
            are 0.
    """

    sparse: ClassVar[bool] = True
    has_exceptions: ClassVar[bool] = False

    @abstractmethod
    def value_streams(self, row: TensorRow, segments: tuple[Segment, ...]) -> Mapping[str, int]:
        """Return the length of the values in each stream; see :meth:`Encoding.streams`."""

    @abstractmethod
    def put_values(self, values: Bits, out: BucketWriter) -> tuple[int, int]:
        """Append the values of one segment.

        Returns:
            The counts ``exceptions`` and ``wide`` of the segment; 0 and 0 if not applicable.
        """

    @abstractmethod
    def read_values(self, tensor: TensorReader) -> Bits:
        """Read the values of all segments.

        Raises:
            MalformedError: The values contradict the row, or are not in canonical form.
        """

    @override
    def fits_row(self, row: TensorRow, numel: int) -> bool:
        return row.gap in (1, 2)

    @override
    def fits_segment(self, row: TensorRow, segment: Segment) -> bool:
        limit = (1 << 8 * row.gap) - 1
        most = segment.nnz + segment.length // limit
        fits = (segment.nnz <= segment.gaps) & (segment.gaps <= most)
        return fits & (segment.exceptions <= (segment.nnz if self.has_exceptions else 0))

    @override
    def streams(self, row: TensorRow, segments: tuple[Segment, ...]) -> Mapping[str, int]:
        names = ("gap8",) if row.gap == 1 else ("gap16.0", "gap16.1")
        gaps = dict.fromkeys(names, sum(s.gaps for s in segments))
        return {**gaps, **self.value_streams(row, segments)}

    @override
    def encode(self, delta: TensorDelta, out: BucketWriter) -> EncodedTensor:
        indices, numel = delta.indices, delta.spec.numel
        if delta.absolute.ndim:
            raise ConfigError(f"{delta.spec.name}: steps and absolute bits do not mix in one part")
        if indices is None or bool(delta.absolute) != self.absolute:
            kind = "absolute bits" if self.absolute else "steps"
            raise ConfigError(f"{delta.spec.name}: {self.name} deltas carry indices and {kind}")
        gap = 2 if delta.nnz < WIDE_GAPS_BELOW * numel else 1
        bounds = np.searchsorted(indices, np.arange(0, numel + SEGMENT, SEGMENT))
        segments = []
        for number in range(len(bounds) - 1):
            low, high = int(bounds[number]), int(bounds[number + 1])
            if low == high:
                continue
            start = number * SEGMENT
            gaps = _put_gaps(indices[low:high] - start, gap, out)
            exceptions, wide = self.put_values(delta.values[low:high], out)
            length = min(SEGMENT, numel - start)
            segments.append(Segment(start, length, high - low, gaps, exceptions, wide))
        return EncodedTensor(gap, segments)

    @override
    def decode(self, tensor: TensorReader) -> TensorDelta:
        return TensorDelta(
            spec=tensor.spec,
            indices=_read_indices(tensor),
            values=self.read_values(tensor),
            absolute=ABSOLUTE if self.absolute else STEP,
        )


def _put_gaps(offsets: Indices, width: int, out: BucketWriter) -> int:
    """Append the gaps of one segment; return the number of gap entries."""
    gaps = host.encode_gaps(offsets, width)
    if width == 1:
        out.put("gap8", gaps)
    else:
        out.put_planes("gap16", gaps)
    return int(gaps.size)


def read_gaps(tensor: TensorReader) -> Bits:
    """Return the gap entries of the segments, uint8 or uint16."""
    return tensor.units("gap8") if tensor.row.gap == 1 else tensor.planes("gap16", 2)


def _read_indices(tensor: TensorReader) -> Indices:
    gaps = read_gaps(tensor)
    out = np.empty(sum(s.nnz for s in tensor.segments), np.int64)
    at, filled = 0, 0
    for segment in tensor.segments:
        mine = gaps[at : at + segment.gaps]
        offsets = host.decode_gaps(mine)
        fits = offsets.size == segment.nnz and offsets[-1] < segment.length
        if not fits or mine[-1] == np.iinfo(mine.dtype).max:
            raise tensor.malformed("gaps leave the segment")
        out[filled : filled + segment.nnz] = offsets
        out[filled : filled + segment.nnz] += segment.start
        at, filled = at + segment.gaps, filled + segment.nnz
    return out


@dataclass(frozen=True, slots=True)
class OverwriteEncoding(SparseEncoding):
    """New bits in ``value.k``: larger than steps, but the reader needs no base."""

    name: ClassVar[str] = "overwrite"
    columns: ClassVar[bool] = True

    @override
    def value_streams(self, row: TensorRow, segments: tuple[Segment, ...]) -> Mapping[str, int]:
        nnz = sum(s.nnz for s in segments)
        return {f"value.{k}": nnz for k in range(row.itemsize)}

    @override
    def put_values(self, values: Bits, out: BucketWriter) -> tuple[int, int]:
        out.put_planes("value", values)
        return 0, 0

    @override
    def read_values(self, tensor: TensorReader) -> Bits:
        return tensor.planes("value", tensor.spec.itemsize)


@dataclass(frozen=True, slots=True)
class StepEncoding(SparseEncoding):
    """Steps ``new - old``: the smallest encoding, but the reader needs the base bits.

    Streams: ``sign`` and ``exception``, one bit a step; ``magnitude``, one byte for each step with
    a magnitude other than 1; ``wide.k``, the whole step if its magnitude is 255 or more.
    """

    name: ClassVar[str] = "step"
    absolute: ClassVar[bool] = False
    has_exceptions: ClassVar[bool] = True
    checked: ClassVar[bool] = True
    columns: ClassVar[bool] = True

    @override
    def estimate(self, spec: TensorSpec, changes: Changes) -> int:
        nnz = int(changes.indices.size)
        if 4 * nnz < spec.numel:  # smaller than the tensor even if every step were wide
            return nnz
        steps = changes.new - changes.old
        magnitude = np.minimum(steps, -steps)
        exceptions = int(np.count_nonzero(magnitude != 1))
        wide = int(np.count_nonzero(magnitude >= 255)) if spec.itemsize > 1 else 0
        return nnz + nnz // 4 + exceptions + wide * spec.itemsize

    @override
    def value_streams(self, row: TensorRow, segments: tuple[Segment, ...]) -> Mapping[str, int]:
        nnz = sum(s.nnz for s in segments)
        exceptions, wide = sum(s.exceptions for s in segments), sum(s.wide for s in segments)
        lengths = {"sign": nnz, "exception": nnz, "magnitude": exceptions}
        return lengths | {f"wide.{k}": wide for k in range(row.itemsize)}

    @override
    def put_values(self, values: Bits, out: BucketWriter) -> tuple[int, int]:
        split = host.split_steps(values)
        out.put("sign", split.negative)
        out.put("exception", split.exception)
        out.put("magnitude", split.magnitude)
        out.put_planes("wide", split.wide)
        return split.magnitude.size, split.wide.size

    def streams_of(self, tensor: TensorReader) -> tuple[npt.NDArray[np.int64], StepStreams]:
        """Return the segments of a tensor, and their streams, for the kernels that decode them."""
        sign, exception = tensor.packed("sign"), tensor.packed("exception")
        streams = StepStreams(
            read_gaps(tensor),
            *sign,
            *exception,
            magnitude=tensor.units("magnitude"),
            wide=tensor.planes("wide", tensor.spec.itemsize),
        )
        return tensor.table, streams

    @override
    def decode(self, tensor: TensorReader) -> TensorDelta:
        segments, streams = self.streams_of(tensor)
        try:
            indices, steps = host.decode_steps(segments, streams)
        except ValueError as exc:
            raise tensor.malformed(str(exc)) from exc
        return TensorDelta(spec=tensor.spec, indices=indices, values=steps)

    @override
    def read_values(self, tensor: TensorReader) -> Bits:
        return self.decode(tensor).values
