"""Choice of the rate and the size of each bin of a tensor: those of the fewest bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from deltachain.codec.old_bits import OldBits
from deltachain.delta import TensorDelta
from deltachain.kernels import host
from deltachain.kernels.tiles import BINS, ESCAPE, MAX_RATE, MAX_SIZE, NEVER, Bytes, TileGrid, bins
from deltachain.types import Bits, Indices, TensorSpec

Numbers = npt.NDArray[np.int64]

_EXPONENTS: Final[Mapping[str, tuple[int, int]]] = {"F8_E4M3": (3, 15), "F8_E5M2": (2, 31)}
"""Shift and mask of the exponent in codes of a byte, which get one rate together."""

OWN_SIZE_BITS: Final = 4
"""Bits of a size in a stored table, if it differs from those beside it (measured: 3 to 5)."""

OWN_TABLE_BITS: Final = 120
"""Bits of a stored table, beyond those of one that was stored before: the best of 0, 60, 120, 200
and 300 for two fp8 models."""

CLASS_BITS: Final = 0.02
"""Bits a change that one more class has to save: every class takes a decoder a pass over all old
bits. It costs 0.03 to 0.07 bits a change, and leaves 5 of 8 classes at 1.1 %. Changes of codes of a
byte are too few for that."""

RECENT: Final = 8
"""Number of tables that a tensor may have in common with those before it."""


def table_of(
    spec: TensorSpec,
    old: OldBits,
    delta: TensorDelta,
    grid: TileGrid,
    tiles: int,
    stored: Sequence[Bytes] = (),
) -> Bytes:
    """Return rate and size of each bin, for the fewest bits in some number of tiles.

    Args:
        spec: Spec of the tensor.
        old: Its bits before the change.
        delta: The change, by indices and steps.
        grid: Its tiles.
        tiles: Number of tiles that are stored.
        stored: Tables of tensors before it, of which one is returned if its own is not worth its
            bytes.
    """
    group = np.arange(BINS)
    if spec.itemsize == 1:
        shift, mask = _EXPONENTS.get(spec.dtype, (0, 0))
        group = (group >> shift) & mask
    changed = bins(old.bits[np.asarray(delta.indices) - old.start], grid.shift, grid.mask)
    there = host.count_bins(old.bits, grid.shift, grid.mask)
    each = _size_bits(changed, delta.values)
    counts = np.bincount(group[changed], minlength=BINS)
    numel = np.bincount(group, weights=there, minlength=BINS).astype(np.int64)
    rates = _rates(counts, numel, tiles, 0.0 if spec.itemsize == 1 else CLASS_BITS)[group]
    sizes = np.where(rates == NEVER, NEVER, _sizes(changed, group, each))
    own: Bytes = np.concatenate([rates, sizes]).astype(np.uint8)
    own[(np.arange(2 * BINS) & (BINS - 1)) > grid.mask] = NEVER
    found = own, np.bincount(changed, minlength=BINS), there
    least, table = _table_bits(*found, tiles, each) + OWN_TABLE_BITS, own
    for other in reversed(stored[-RECENT:]):
        if (other[grid.mask + 1 : BINS] == NEVER).all():
            bits = _table_bits(other, *found[1:], tiles, each)
            if bits < least:
                least, table = bits, other
    return table


def _table_bits(
    table: Bytes, counts: Numbers, numel: Numbers, tiles: int, each: npt.NDArray[np.float64]
) -> float:
    """Return the bits of a tensor's ranks and magnitudes with a table; infinite if it has none.

    Args:
        table: Rates and sizes.
        counts: ``(256,)`` changed elements of each bin.
        numel: ``(256,)`` elements of each bin.
        tiles: Number of its tiles.
        each: See :func:`_size_bits`.
    """
    rates, sizes = table[:BINS].astype(np.int64), table[BINS:].astype(np.int64)
    changed = counts > 0
    if (rates[changed] == NEVER).any():
        return np.inf
    sizes = np.where(sizes == NEVER, each.shape[1] - 1, sizes)[changed]
    if (sizes >= each.shape[1]).any():  # larger than any that was tried
        return np.inf
    total = float(each[changed, sizes].sum())
    members = rates != NEVER
    by_rate = [np.bincount(rates[members], some[members], MAX_RATE + 1) for some in (counts, numel)]
    for rate in np.flatnonzero(by_rate[1]).tolist():
        count, elements = (int(some[rate]) for some in by_rate)
        end = elements / tiles / (1 << rate) + 1  # a class without changes is passed as a whole
        if count:
            bits = _class_bits(np.array([count]), np.array([elements]), 0)[0, rate]
            total += float(bits)
            end = min(end, float(bits) / count - rate)
        total += tiles * end
    return total


def _rates(counts: Numbers, numel: Numbers, tiles: int, class_bits: float = 0.0) -> Numbers:
    """Return the Rice parameter of ranks of each group, for the fewest bits.

    Groups of one rate are a class together, which ends once in each tile: groups that change about
    as often share a rate where that saves more than ranks in a larger class cost. A class has to
    save ``class_bits`` a change as well.
    """
    own = class_bits * float(counts.sum())
    groups = np.flatnonzero(counts)
    groups = groups[np.argsort(-counts[groups] / numel[groups], kind="stable")]
    changes, elements = (np.cumsum([0, *some[groups]]) for some in (counts, numel))
    least = np.zeros(len(groups) + 1)
    found = np.full((len(groups) + 1, 2), NEVER)  # first group of the last class, and its rate
    for end in range(1, len(groups) + 1):
        bits = _class_bits(changes[end] - changes[:end], elements[end] - elements[:end], tiles)
        best = bits.argmin(axis=1)
        total = least[:end] + bits.min(axis=1) + own
        first = int(total.argmin())
        least[end], found[end] = total[first], (first, best[first])
    rates, end = np.full(BINS, NEVER), len(groups)
    while end:
        first, rate = found[end].tolist()
        rates[groups[first:end]] = rate
        end = first
    return rates


def _class_bits(counts: Numbers, numel: Numbers, tiles: int) -> npt.NDArray[np.float64]:
    """Return the bits of the ranks of some classes by rate, ``(n, rates)``, ends included."""
    share = np.minimum(counts / numel, 1)[:, np.newaxis]
    passed = (1 - share) ** (1 << np.arange(MAX_RATE + 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        ones = 1 / (1 - passed)
    bits: npt.NDArray[np.float64] = counts[:, np.newaxis] * (np.arange(MAX_RATE + 1) + ones)
    bits += tiles * ones
    return bits


def _sizes(changed: Bytes, group: Indices, each: npt.NDArray[np.float64]) -> Indices:
    """Return the Rice parameter of magnitudes of each bin, for the fewest bits.

    Bins of a group have one size, unless what they save with their own pays for the table.
    """
    together = np.zeros_like(each)
    np.add.at(together, group, each)
    shared = together.argmin(axis=1)[group]
    own = each.argmin(axis=1)
    differs = (own != shared) & np.bincount(changed, minlength=BINS).astype(np.bool_)
    at = np.arange(BINS)
    saved = np.where(differs, each[at, shared] - each[at, own] - OWN_SIZE_BITS, 0)
    total = np.bincount(group, weights=saved, minlength=BINS)
    chosen = np.where(differs & (total[group] > 0), own, shared)
    return np.where(chosen == each.shape[1] - 1, NEVER, chosen)


def _size_bits(changed: Bytes, steps: Bits) -> npt.NDArray[np.float64]:
    """Return the bits of magnitudes by bin and size, ``(256, sizes)``; the last size is none."""
    excess = np.minimum(steps, (0 - steps).astype(steps.dtype)) - steps.dtype.type(1)
    large = excess > 0
    ones = np.bincount(changed, minlength=BINS) - np.bincount(changed[large], minlength=BINS)
    kinds, excess = changed[large], excess[large].astype(np.uint64)
    some = np.bincount(kinds, minlength=BINS)
    width = 8 * steps.itemsize
    costs = []
    for size in range(min(width, MAX_SIZE + 1)):
        quotient = (excess >> np.uint64(size)).astype(np.int64)
        escaped = quotient >= ESCAPE
        bits = np.where(escaped, ESCAPE + width, quotient + 1 + size)
        costs.append(np.bincount(kinds, weights=bits, minlength=BINS) + (1 + size) * ones)
        if size > 8 and not escaped.any():
            break
    costs.append(np.where(some > 0, np.inf, 0.0))
    return np.stack(costs, axis=1)
