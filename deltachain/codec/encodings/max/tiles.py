"""Tiles of the encoding ``max``: arrays and bounds of its kernels (FORMAT.md 4, "Tiles").

A *tile* is a box of elements of one segment. Its elements are divided into *classes* by their old
bits, and changed ones are stored by their ranks inside their classes, as Rice codes of distances. A
distance may end in a later class, of which each element counts less.
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from deltachain.types import Bits

Bytes = npt.NDArray[np.uint8]

BINS: Final = 256  # number of bins of old bits
NEVER: Final = 255
"""Rate of a bin whose elements did not change; size of a bin whose steps are all 1 or -1."""
MAX_RATE: Final = 20  # largest Rice parameter of ranks: a segment has at most `2**20` elements
MAX_SIZE: Final = 31  # largest Rice parameter of magnitudes
MAX_CUTS: Final = 64  # largest number of tiles side by side in a segment
ESCAPE: Final = 24
"""Number of one bits after which a magnitude is stored in the width of an element."""

# What is wrong with tiles that are refused.
RANKS: Final = "ranks leave the tile"
MAGNITUDES: Final = "magnitudes are not canonical"
ENDS: Final = "the bits of a tile end early or late"


class TileGrid(NamedTuple):
    """Tiles of the segments of one tensor."""

    columns: int  # elements of a row of the tensor: its last dimension
    cuts: int  # tiles side by side in a segment; with 1, a segment is one tile of any length
    shift: int  # right shift of old bits that gives a bin, after `mask`
    mask: int  # mask of a bin
    start: int = 0  # flat index of the first of the old bits


class CodedTiles(NamedTuple):
    """Tiles of some segments."""

    data: Bytes  # the bytes of all segments, end to end
    nbytes: npt.NDArray[np.int64]  # bytes of each segment


class TileStreams(NamedTuple):
    """Tiles of one tensor and what a reader needs to decode them."""

    data: Bytes  # the bytes of some segments, of the lengths that the segments say; untrusted
    old: Bits  # bits before the change, from flat index `grid.start` on
    table: Bytes  # `(512,)` rates and sizes, known to be canonical
    grid: TileGrid  # the tiles
    # `(n, cuts)` bool: tiles to decode; by default all. Of the others, old bits are not read.
    wanted: npt.NDArray[np.bool_] | None = None


def bins(bits: Bits, shift: int, mask: int) -> Bytes:
    """Return the bin of each element, by its bits."""
    kind = bits.dtype.type
    return ((bits >> kind(shift)) & kind(mask)).astype(np.uint8)


def most_nbytes(length: int, nnz: int, cuts: int) -> int:
    """Return an upper bound of the bytes of a segment's tiles."""
    return length // 8 + 16 * nnz + 16 * cuts
