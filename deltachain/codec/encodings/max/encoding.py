"""Encoding ``max``: changed elements as ranks inside classes of the old bits, in tiles."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from deltachain.codec.container import SEGMENT, Segment, TensorRow
from deltachain.codec.encodings.base import EncodedTensor, Encoding
from deltachain.codec.encodings.max import tiles
from deltachain.codec.encodings.max.tiles import BinCounts, table_of
from deltachain.codec.encodings.sparse import StepEncoding
from deltachain.codec.frames import BucketWriter, TensorReader
from deltachain.delta import OldBits, TensorDelta
from deltachain.errors import ConfigError, OldBitsError
from deltachain.kernels.arrays import Changes, StagedSteps, WindowPlace
from deltachain.types import Bits, TensorSpec

ROW_FACTORS: Final = (2, 2, 2, 3, 2)
COLUMN_FACTORS: Final = (2, 2, 2, 2)
"""Factors that our tiles divide rows and columns by, as far as they divide evenly: the usual widths
of tensor parallelism, for matrices that are several as well, such as queries, keys and values."""

TILE_NBYTES: Final = 1 << 18
"""Fewest bytes of weights of our tiles: half of it takes up to 0.05 bits a change more where 0.1 %
change, and a quarter 0.07 to 0.14, for 109 to 135 M parameters in 2, 30 and 32 layers."""

SMALL_TILES: Final = ((2, 1 << 10), (4, 1 << 17))
"""Fewest bytes of tiles that divide a side into so many parts at most. Small matrices are divided
too: a rank that cuts one tile can use nothing of a delta (0.07 to 0.1 bits a change where 0.1 %
change, for 109 and 135 M parameters in 32 and 30 layers)."""

VOCABULARY: Final = 4096  # rows from which a matrix may be a vocabulary
PADDED_TO: Final = 64
"""Engines fill up the rows of a vocabulary to a multiple of this before they divide them."""

SMALL_NUMEL: Final = 1 << 16
"""Most elements of tensors that are not divided, and are given without old bits, so that ranks may
cut them anywhere: as ``step`` they need eight streams more, 1 KB."""

_SCALES: Final = re.compile(r"[^.]*scale[^.]*")
"""Last word of the names of scales, which ranks share in other places than codes. They are given
without old bits up to the largest segment; a wrong guess costs some bits."""

BINNED: Final[Mapping[str, tuple[int, int]]] = {
    "BF16": (7, 255),
    "F16": (10, 31),
    "F32": (23, 255),
    "F64": (55, 255),
}
"""Shift and mask of the bin of each floating point dtype of several bytes: its exponent, or the
highest bits of it. Of dtypes of one byte, it is the code; of all others, there is one bin."""

_STEP: Final = StepEncoding()
_UNUSED: Final = np.full(2 * tiles.BINS, tiles.NEVER, np.uint8)
"""Rates and sizes of a tensor that did not change."""


class Tiling(NamedTuple):
    band: int
    cuts: int


# The kernels are imported when they run: numba is slow to import, see deltachain.kernels.host.


@dataclass(frozen=True, slots=True)
class MaxEncoding(Encoding):
    """Ranks of changed elements in classes of old bits: the fewest bytes, at slower decoding.

    The reader needs the old bits of all elements of a tile, but for small tensors that are one
    class. Streams: ``class``, 512 bytes a tensor: Rice parameters of ranks and of magnitudes, by
    bin of old bits; ``tile``, the coded tiles.
    """

    name: ClassVar[str] = "max"
    sparse: ClassVar[bool] = True
    absolute: ClassVar[bool] = False
    checked: ClassVar[bool] = True
    needs_old: ClassVar[bool] = True
    compact: ClassVar[bool] = True
    stages: ClassVar[bool] = True
    columns: ClassVar[bool] = True
    shared: ClassVar[frozenset[str]] = frozenset(["class"])

    @override
    def suits(self, spec: TensorSpec) -> bool:
        """Return whether a tensor is small, or two ranks that share it evenly cut no tile."""
        return spec.numel <= _most_alone(spec) or self.encodes_with_old(spec)

    @override
    def encodes_with_old(self, spec: TensorSpec) -> bool:
        """Return whether two ranks that share rows or columns evenly cut no tile.

        Codes of int8 have steps that are equally wide everywhere, and wider integers one rate:
        their old bits tell nothing.
        """
        if _is_scale(spec):
            return False
        band, cuts = tiling(spec)
        binned = spec.dtype in BINNED or (spec.itemsize == 1 and spec.dtype != "I8")
        if not band or not binned:
            return False
        rows, columns = _matrix_rows(spec), spec.shape[-1]
        return (band < rows or rows % 2 == 1) and (cuts > 1 or columns % 2 == 1)

    @override
    def decodes_with_old(self, row: TensorRow) -> bool:
        return row.gap > 0

    @override
    def estimate(self, spec: TensorSpec, changes: Changes) -> int:
        return _STEP.estimate(spec, changes)

    @override
    def fits_row(self, row: TensorRow, numel: int) -> bool:
        columns = row.shape[-1] if row.shape else 1
        divides = row.gap <= 1 or (columns > 0 and columns % row.gap == 0)
        fits = row.gap > 0 or numel <= SEGMENT
        return row.gap <= tiles.MAX_CUTS and fits and divides

    @override
    def fits_segment(self, row: TensorRow, segment: Segment) -> bool:
        columns = row.shape[-1] if row.gap > 1 else 1
        whole_rows = (segment.start % columns == 0) & (segment.length % columns == 0)
        fits = segment.gaps <= tiles.most_nbytes(segment.length, segment.nnz, max(row.gap, 1))
        return whole_rows & fits & (segment.exceptions == 0) & (segment.wide == 0)

    @override
    def streams(self, row: TensorRow, segments: tuple[Segment, ...]) -> Mapping[str, int]:
        return {
            "class": 2 * tiles.BINS if row.segments else 0,
            "tile": sum(s.gaps for s in segments),
        }

    @override
    def encode(self, delta: TensorDelta, out: BucketWriter) -> EncodedTensor:
        from deltachain.codec.encodings.max.coder import encode_tiles  # noqa: PLC0415

        spec, indices, old = delta.spec, delta.indices, out.old
        if indices is None or delta.absolute.any():
            raise ConfigError(f"{spec.name}: max deltas carry indices and steps")
        if old is not None:
            cuts = tiling(spec).cuts
            windows = np.array(list(_windows(spec, old.start, old.stop)), np.int64)
        elif spec.numel <= _most_alone(spec):
            old, cuts, windows = _no_bits(spec, spec.numel), 0, np.array([(0, spec.numel)])
        else:
            raise ConfigError(f"{spec.name}: max deltas are encoded with the bits before them")
        if not indices.size:
            return EncodedTensor(gap=cuts)
        bounds = np.searchsorted(indices, [*windows[:, 0], old.stop])
        changed = np.diff(bounds)
        kept, counts = windows[changed > 0], changed[changed > 0]
        grid = _grid(spec, cuts, old.start)
        stored: Any = out.pieces.get("class", ())
        own = BinCounts.of(old, delta, grid)
        alike = self.name, spec.dtype, grid.mask
        so_far = out.notes.get(alike)
        so_far = out.notes[alike] = own if so_far is None else so_far + own
        table = table_of(spec, own, grid, so_far, stored)
        coded = encode_tiles(kept, indices, delta.values, old.bits, table, grid)
        out.put("class", table)
        out.put("tile", coded.data)
        rows = zip(kept.tolist(), counts.tolist(), coded.nbytes.tolist(), strict=True)
        segments = [Segment(start, length, nnz, n) for (start, length), nnz, n in rows]
        return EncodedTensor(cuts, segments)

    def streams_of(self, tensor: TensorReader) -> tuple[npt.NDArray[np.int64], tiles.TileStreams]:
        """Return the segments of a tensor, and their tiles, for the kernels that decode them."""
        old = tensor.old
        if not tensor.row.gap:
            old = _no_bits(tensor.spec, tensor.spec.numel if tensor.segments else 0)
        if old is None:
            raise OldBitsError(
                f"{tensor.key}: {tensor.spec.name!r} needs the bits before it, which are not at "
                "hand here",
                hint="publish with encoding='step'",
            )
        grid, wanted = _grid(tensor.spec, tensor.row.gap, old.start), None
        data, table = np.empty(0, np.uint8), _UNUSED
        if tensor.segments:
            first, last = tensor.segments[0], tensor.segments[-1]
            if first.start < old.start or last.start + last.length > old.stop:
                raise _cut(tensor)
            data, table = tensor.units("tile"), tensor.units("class")
            if not _is_canonical(table, grid.mask):
                raise tensor.malformed("rates and sizes are not canonical")
            wanted = None if old.held is None else _wanted(tensor, grid, old.held)
        return tensor.table, tiles.TileStreams(data, old.bits, table, grid, wanted)

    @override
    def decode(self, tensor: TensorReader) -> TensorDelta:
        from deltachain.codec.encodings.max.coder import decode_tiles  # noqa: PLC0415

        segments, streams = self.streams_of(tensor)
        try:
            indices, steps = decode_tiles(segments, streams)
        except ValueError as exc:
            raise tensor.malformed(str(exc)) from exc
        return TensorDelta(spec=tensor.spec, indices=indices, values=steps)

    @override
    def stage(
        self, tensor: TensorReader, box: WindowPlace, weights: Bits, key: tuple[int, int]
    ) -> StagedSteps:
        from deltachain.codec.encodings.max.coder import stage_tiles  # noqa: PLC0415

        segments, streams = self.streams_of(tensor)
        try:
            return stage_tiles(segments, streams, box, weights, key)
        except ValueError as exc:
            raise tensor.malformed(str(exc)) from exc


def _wanted(
    tensor: TensorReader, grid: tiles.TileGrid, held: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    wanted = np.empty((len(tensor.segments), grid.cuts), np.bool_)
    for number, segment in enumerate(tensor.segments):
        low = segment.start - grid.start
        width = segment.length if grid.cuts == 1 else grid.columns // grid.cuts
        known = held[low : low + segment.length].reshape(-1, grid.cuts, width)
        wanted[number] = known.all(axis=(0, 2))
        if (known.any(axis=(0, 2)) != wanted[number]).any():
            raise _cut(tensor)
    return wanted


def _cut(tensor: TensorReader) -> OldBitsError:
    return OldBitsError(
        f"{tensor.key}: a share of {tensor.spec.name!r} cuts a tile of the encoding max",
        hint="publish with encoding='step', or share the model among fewer ranks",
    )


def _is_scale(spec: TensorSpec) -> bool:
    return _SCALES.fullmatch(spec.name.rpartition(".")[2]) is not None


def _most_alone(spec: TensorSpec) -> int:
    """Return up to how many elements a tensor is given without old bits, if it is not divided."""
    return SEGMENT if _is_scale(spec) else SMALL_NUMEL


def _no_bits(spec: TensorSpec, numel: int) -> OldBits:
    """Return what stands for old bits where all elements are one class."""
    return OldBits(np.zeros(numel, spec.bits_dtype))


def _grid(spec: TensorSpec, cuts: int, start: int) -> tiles.TileGrid:
    if not cuts:
        return tiles.TileGrid(1, 1, 0, 0, start)
    shift, mask = BINNED.get(spec.dtype, (0, 255 if spec.itemsize == 1 else 0))
    return tiles.TileGrid(spec.shape[-1] if spec.shape else 1, cuts, shift, mask, start)


def _is_canonical(table: tiles.Bytes, mask: int) -> bool:
    rates, sizes = table[: tiles.BINS], table[tiles.BINS :]
    fits = (rates == tiles.NEVER) | (rates <= tiles.MAX_RATE)
    fits &= (sizes == tiles.NEVER) | ((sizes <= tiles.MAX_SIZE) & (rates != tiles.NEVER))
    return bool(fits.all()) and bool((rates[mask + 1 :] == tiles.NEVER).all())


def tiling(spec: TensorSpec) -> Tiling:
    """Return how our tiles divide a tensor.

    Tensors of more dimensions are matrices of their last two, unless those are smaller than a tile.
    Vectors, and matrices of rows that no segment holds, are not divided.
    """
    shape = spec.shape
    if len(shape) < 2 or shape[-1] > SEGMENT:
        return Tiling(0, 1)
    rows, columns = _matrix_rows(spec), shape[-1]
    if len(shape) == 2 and rows >= VOCABULARY:
        rows += -rows % PADDED_TO
    nbytes = rows * columns * spec.itemsize
    parts, left = [1, 1], [list(ROW_FACTORS), list(COLUMN_FACTORS)]
    while any(left):
        side = min((n for n in (0, 1) if left[n]), key=lambda n: parts[n])
        more = parts[side] * left[side].pop(0)
        least = next((least for most, least in SMALL_TILES if more <= most), TILE_NBYTES)
        if (rows, columns)[side] % more == 0 and nbytes >= least * more * parts[1 - side]:
            parts[side] = more
    return Tiling(rows // parts[0] if max(parts) > 1 else 0, parts[1])


def _matrix_rows(spec: TensorSpec) -> int:
    shape = spec.shape
    rows = shape[-2]
    for dim in reversed(shape[:-2]):
        if rows * shape[-1] * spec.itemsize >= TILE_NBYTES:
            break
        rows *= dim
    return rows


def _windows(spec: TensorSpec, low: int, high: int) -> Iterator[tuple[int, int]]:
    """Yield start and length of the segments that our tiles have between two elements."""
    band, _ = tiling(spec)
    columns = spec.shape[-1] if band else 1
    band = band or high
    most = SEGMENT // columns
    first, last = low // columns, high // columns
    while first < last:
        stop = min((first // band + 1) * band, last)
        pieces = -(-(stop - first) // most)
        bounds = [first + (stop - first) * n // pieces for n in range(pieces + 1)]
        for at, end in pairwise(bounds):
            yield at * columns, (end - at) * columns
        first = stop
