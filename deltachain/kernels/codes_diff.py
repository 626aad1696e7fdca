"""Diff of quantised weights on the host: one pass from weights to changed codes; numba only.

Rows are taken in bands, each whole rows of blocks that stay in the cache: the largest magnitudes of
the band's blocks are found, each gives its factor by a table, and then its weights are cast,
quantised, compared with the codes of the snapshot and compacted, a block of the diff at a time.
Neither a cast copy nor a copy of the codes is made.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from deltachain.kernels.codes import WeightBits, fill_codes, raise_amax
from deltachain.kernels.compiling import compiled
from deltachain.kernels.emitting import BLOCK, drive, emit, emit_rest
from deltachain.kernels.quantised import KINDS, Rounding, WindowBlocks
from deltachain.kernels.reference import Changes

TILE: Final = 8192
"""Codes made at a time: they stay in the first cache."""

BAND: Final = 1 << 16
"""Weights of a band, unless a row of blocks has more: as fp32 they fit in the second cache."""


class BlockFactors(NamedTuple):
    """Factors of a window's blocks, by their largest magnitudes.

    Attributes:
        amax: bf16 bits of the largest magnitude of each block, ``(R, C)``: those of the weights
            raise them, unless they are known.
        table: Factor of a block by the bits of its largest magnitude, fp32 of shape ``(32768,)``; 0
            where such a block is refused.
        known: Whether ``amax`` is that of all weights already, and each has a factor.
    """

    amax: npt.NDArray[np.uint16]
    table: npt.NDArray[np.float32]
    known: bool


@compiled
def _fill(weights: Any, first: int, factors: Any, place: Any, out: Any) -> None:  # noqa: ANN401
    """Make the codes of consecutive weights, of any number of rows and blocks."""
    (amax, table, _), (at, size, kind) = factors, place
    columns, count = weights.shape[1], out.shape[0]
    row, column = first // columns, first % columns
    one, left = (column + at[1]) // size[1], size[1] - (column + at[1]) % size[1]
    line, done = (row + at[0]) // size[0], 0
    while done < count:
        run = min(count - done, columns - column, left)
        factor = table[amax[line, one]]
        fill_codes(weights[row, column : column + run], factor, out[done : done + run], kind)
        done += run
        column += run
        one, left = one + 1, size[1]
        if column == columns:
            row, column = row + 1, 0
            line = (row + at[0]) // size[0]
            one, left = at[1] // size[1], size[1] - at[1] % size[1]


@compiled
def _raise(weights: Any, low: int, high: int, factors: Any, place: Any) -> bool:  # noqa: ANN401
    """Raise the largest magnitudes of the blocks of a band; return whether all have a factor."""
    (amax, table, _), (at, size, _) = factors, place
    first = (low + at[0]) // size[0]
    part = amax[first : (high - 1 + at[0]) // size[0] + 1]
    raise_amax(weights[low:high], (low + at[0] - first * size[0], at[1]), size, part)
    for row in range(part.shape[0]):
        for column in range(part.shape[1]):
            if table[part[row, column]] == np.float32(0.0):
                return False
    return True


@compiled
def _diff(
    snapshot: Any,  # noqa: ANN401
    weights: Any,  # noqa: ANN401
    factors: Any,  # noqa: ANN401
    place: Any,  # noqa: ANN401
    start: int,
    out: Any,  # noqa: ANN401
) -> tuple[int, int]:
    """Diff from ``start`` while there is room for a block; return the end, or -1, and a count."""
    codes, mask = np.empty(TILE, np.uint8), np.empty(BLOCK, np.uint8)
    scratch = mask, mask.view(np.uint64), np.empty(BLOCK // 8 + 1, np.int64)
    at, size, _ = place
    (rows, columns), room = weights.shape, out[0].shape[0] - BLOCK
    height = size[0] * max(1, BAND // (size[0] * columns))
    here, count = start, 0
    while here < rows * columns and count <= room:
        band = (here // columns + at[0]) // height
        low, high = max(0, band * height - at[0]), min(rows, (band + 1) * height - at[0])
        # A band that was interrupted has its magnitudes.
        is_new = not factors[2] and here == low * columns
        if is_new and not _raise(weights, low, high, factors, place):
            return -1, count
        stop = high * columns
        while here < stop and count <= room:
            tile = codes[: min(TILE, stop - here)]
            _fill(weights, here, factors, place, tile)
            done = 0
            while done + BLOCK <= tile.shape[0] and count <= room:
                part = snapshot[here : here + BLOCK]
                count = emit(tile[done : done + BLOCK], part, here, out, scratch, count)
                done, here = done + BLOCK, here + BLOCK
            if done + BLOCK > tile.shape[0] and count <= room:
                rest = tile[done:]
                count = emit_rest(rest, snapshot[here : here + rest.shape[0]], here, out, count)
                here += rest.shape[0]
    return here, count


def codes_diff_(
    snapshot: npt.NDArray[np.uint8],
    weights: WeightBits,
    factors: BlockFactors,
    blocks: WindowBlocks,
    rounding: Rounding,
) -> tuple[Changes, bool]:
    """Find the codes of weights that differ from ``snapshot``, and copy them there.

    Args:
        snapshot: Flat bits of ``(N * K,)`` codes.
        weights: Bits of ``(N, K)`` weights.
        factors: Factors of the blocks; their magnitudes are raised.
        blocks: Where the blocks are.
        rounding: How a weight and its factor make a code.

    Returns:
        The changes, and whether every block has a factor; otherwise there are no changes, and the
        snapshot is as it was.
    """
    given, place = tuple(factors), (*blocks, KINDS[rounding])

    def run(start: int, out: Any) -> tuple[int, int]:  # noqa: ANN401
        ended: tuple[int, int] = _diff(snapshot, weights, given, place, start, out)
        return ended

    return drive(run, snapshot)
