"""Tiles of the encoding ``max`` (FORMAT.md 4, "Tiles"), and the choice of their rates and sizes.

A *tile* is a box of elements of one segment. Its elements are divided into *classes* by their old
bits, and changed ones are stored by their ranks inside their classes, as Rice codes of distances. A
distance may end in a later class, of which each element counts less.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from deltachain.delta import OldBits, TensorDelta
from deltachain.types import Bits, Indices, TensorSpec

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
    kind = bits.dtype.type
    return ((bits >> kind(shift)) & kind(mask)).astype(np.uint8)


def most_nbytes(length: int, nnz: int, cuts: int) -> int:
    """Return an upper bound of the bytes of a segment's tiles."""
    return length // 8 + 16 * nnz + 16 * cuts


Numbers = npt.NDArray[np.int64]

_EXPONENTS: Final[Mapping[str, tuple[int, int]]] = {"F8_E4M3": (3, 15), "F8_E5M2": (2, 31)}
"""Shift and mask of the exponent in codes of a byte, which get one rate together."""

OWN_SIZE_BITS: Final = 4
"""Bits of a size in a stored table, if it differs from those beside it (measured: 3 to 5)."""

OWN_TABLE_BITS: Final = 150
"""Bits of a stored table, beyond those of one that was stored before: 120 to 220 take as many bits
within 0.01 a change, for three models and their fp8 codes."""

COMMON_TABLE_BITS: Final = 60
"""The same of a table for all tensors so far, which is likely to suit those that follow."""

CLASS_BITS: Final = 0.025
"""Bits a change that one more class has to save: every class takes a decoder a pass over all old
bits. It leaves 6 to 7 of 8 to 14 classes, for 0.02 to 0.06 bits a change (bf16 at 0.13 and 1.2 %,
fp8 codes, two models)."""

BYTE_CLASS_BITS: Final = 0.01
"""The same for elements of one byte, of which passes take less time: 0.03 bits a change less of fp8
codes with a scale a block, 0.06 to 0.08 of codes of ``mxfp8``, and staging at 0.54 instead of 0.58
of the speed of ``step``."""

_RATES: Final = np.arange(MAX_RATE + 1)

RECENT: Final = 8  # number of tables that a tensor may have in common with those before it
SCANNED: Final = 64  # number of tables that are searched for some of the same kind


@dataclass(frozen=True, slots=True, eq=False)
class BinCounts:
    """Changes of one tensor, or of several, by bin of old bits."""

    changed: Numbers  # `(256,)` changed elements
    numel: Numbers  # `(256,)` elements
    # `(256, sizes + 1)` bits of the magnitudes for each size; the last is none.
    size_bits: npt.NDArray[np.float64]

    @classmethod
    def of(cls, old: OldBits, delta: TensorDelta, grid: TileGrid) -> "BinCounts":
        changed = bins(old.bits[np.asarray(delta.indices) - old.start], grid.shift, grid.mask)
        from deltachain.codec.encodings.max.classes import count_bins  # noqa: PLC0415 - numba is slow

        numel = count_bins(old.bits, grid.shift, grid.mask)
        return cls(np.bincount(changed, minlength=BINS), numel, _size_bits(changed, delta.values))

    def __add__(self, other: "BinCounts") -> "BinCounts":
        return BinCounts(
            self.changed + other.changed,
            self.numel + other.numel,
            self.size_bits + other.size_bits,
        )


def table_of(
    spec: TensorSpec,
    counts: BinCounts,
    grid: TileGrid,
    so_far: BinCounts | None = None,
    stored: Sequence[Bytes] = (),
) -> Bytes:
    """Return rate and size of each bin, for the fewest bits."""
    own = [_best_table(spec, some, grid) for some in (counts, so_far) if some is not None]
    alike = [
        other
        for other in reversed(stored[-SCANNED:])
        if (other[grid.mask + 1 : BINS] == NEVER).all()
    ]
    prices = (OWN_TABLE_BITS, COMMON_TABLE_BITS)[: len(own)]
    bits = [_table_bits(table, counts) + price for table, price in zip(own, prices, strict=True)]
    bits += [_table_bits(table, counts) for table in alike[:RECENT]]
    return [*own, *alike][int(np.argmin(bits))]


def _best_table(spec: TensorSpec, counts: BinCounts, grid: TileGrid) -> Bytes:
    """Return the table of the fewest bits, whatever it takes itself."""
    group, class_bits = np.arange(BINS), CLASS_BITS
    if spec.itemsize == 1:
        class_bits = BYTE_CLASS_BITS
        shift, mask = _EXPONENTS.get(spec.dtype, (0, 0))
        group = (group >> shift) & mask
    changed = np.bincount(group, weights=counts.changed, minlength=BINS).astype(np.int64)
    numel = np.bincount(group, weights=counts.numel, minlength=BINS).astype(np.int64)
    rates = _rates(changed, numel, class_bits)[group]
    sizes = np.where(rates == NEVER, NEVER, _sizes(group, counts))
    table: Bytes = np.concatenate([rates, sizes]).astype(np.uint8)
    table[(np.arange(2 * BINS) & (BINS - 1)) > grid.mask] = NEVER
    return table


def _table_bits(table: Bytes, counts: BinCounts) -> float:
    """Return the bits of a tensor's ranks and magnitudes with a table; infinite if it has none."""
    rates, sizes = table[:BINS].astype(np.int64), table[BINS:].astype(np.int64)
    changed = counts.changed > 0
    if (rates[changed] == NEVER).any():
        return np.inf
    none = counts.size_bits.shape[1] - 1
    if ((sizes[changed] >= none) & (sizes[changed] != NEVER)).any():  # a table of wider elements
        return np.inf
    chosen = np.where(sizes == NEVER, none, sizes)[changed]
    total = float(counts.size_bits[changed, chosen].sum())
    members = rates != NEVER
    count, numel = (
        np.bincount(rates[members], some[members], MAX_RATE + 1)
        for some in (counts.changed, counts.numel)
    )
    used = numel > 0
    share = np.minimum(count[used] / numel[used], 1)
    return total + float(_rank_bits(count[used], numel[used], share, _RATES[used]).sum())


def _rates(counts: Numbers, numel: Numbers, class_bits: float) -> Numbers:
    """Return the Rice parameter of ranks of each group, for the fewest bits.

    Groups of one rate are a class together. A class has to save ``class_bits`` a change.
    """
    own = class_bits * float(counts.sum())
    groups = np.flatnonzero(counts)
    groups = groups[np.argsort(-counts[groups] / numel[groups], kind="stable")]
    changes, elements = (np.cumsum([0, *some[groups]]) for some in (counts, numel))
    some, there = (ends[np.newaxis] - ends[:, np.newaxis] for ends in (changes, elements))
    share = np.clip(some / np.maximum(there, 1), 0, 1)
    # Of a class, by its first group, the one behind it and its rate.
    bits = _rank_bits(some[..., np.newaxis], there[..., np.newaxis], share[..., np.newaxis], _RATES)
    fewest, best = bits.min(axis=2), bits.argmin(axis=2)
    least = np.zeros(len(groups) + 1)
    found = np.zeros(len(groups) + 1, np.int64)  # first group of the last class
    for end in range(1, len(groups) + 1):
        total = least[:end] + fewest[:end, end] + own
        found[end] = total.argmin()
        least[end] = total[found[end]]
    rates, end = np.full(BINS, NEVER), len(groups)
    while end:
        rates[groups[found[end] : end]] = best[found[end], end]
        end = int(found[end])
    return rates


def _rank_bits(
    counts: npt.NDArray[Any], numel: npt.NDArray[Any], share: npt.NDArray[Any], rates: Numbers
) -> npt.NDArray[np.float64]:
    """Return the bits of the ranks of classes; one without changes is passed as a whole."""
    passed = (1 - share) ** (1 << rates)
    ones = 1 / np.maximum(1 - passed, 2.0**-60)
    bits: npt.NDArray[np.float64] = np.where(
        counts > 0, counts * (rates + ones), numel / (1 << rates)
    )
    return bits


def _sizes(group: Indices, counts: BinCounts) -> Indices:
    """Return the Rice parameter of magnitudes of each bin, for the fewest bits.

    Bins of a group have one size, unless what they save with their own pays for the table.
    """
    each = counts.size_bits
    together = np.zeros_like(each)
    np.add.at(together, group, each)
    shared = together.argmin(axis=1)[group]
    own = each.argmin(axis=1)
    differs = (own != shared) & (counts.changed > 0)
    at = np.arange(BINS)
    saved = np.where(differs, each[at, shared] - each[at, own] - OWN_SIZE_BITS, 0)
    total = np.bincount(group, weights=saved, minlength=BINS)
    chosen = np.where(differs & (total[group] > 0), own, shared)
    return np.where(chosen == each.shape[1] - 1, NEVER, chosen)


def _size_bits(changed: Bytes, steps: Bits) -> npt.NDArray[np.float64]:
    """Return the bits of magnitudes by bin and size, ``(256, sizes + 1)``; the last is none."""
    excess = np.minimum(steps, (0 - steps).astype(steps.dtype)) - steps.dtype.type(1)
    large = excess > 0
    ones = np.bincount(changed, minlength=BINS) - np.bincount(changed[large], minlength=BINS)
    kinds, excess = changed[large], excess[large].astype(np.uint64)
    some, width = np.bincount(kinds, minlength=BINS), 8 * steps.itemsize
    costs: list[npt.NDArray[np.float64]] = []
    all_small = False
    for size in range(min(width, MAX_SIZE + 1)):
        if all_small:  # each takes a bit more with a larger size
            costs.append(costs[-1] + some + ones)
            continue
        quotient = (excess >> np.uint64(size)).astype(np.int64)
        bits = np.where(quotient >= ESCAPE, ESCAPE + width, quotient + 1 + size)
        costs.append(np.bincount(kinds, weights=bits, minlength=BINS) + (1 + size) * ones)
        all_small = not quotient.any()
    costs.append(np.where(some > 0, np.inf, 0.0))
    return np.stack(costs, axis=1)
