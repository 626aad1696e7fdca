"""Entropy limits of one update in bits a change, lower bounds for encodings of each kind.

Of bf16 weights given the old exponent, of 8-bit codes given the whole old code.

All figures are empirical entropies of the given update, without the cost of tables.
``tests/unit/bench/test_chains.py`` compares them with the codec study behind the format.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from deltachain.errors import ConfigError
from deltachain.types import Bits
from tests.bench.chains import U16, Step

Steps16: TypeAlias = npt.NDArray[np.int16]
"""``new - old`` of bf16 bits, wrapping: +-1 is one unit in the last place."""

EXPONENT_BIAS: Final = 127


class ExponentRow(NamedTuple):
    """Elements with one exponent of the old bits, and their changes."""

    exponent: int
    elements: float
    flips: float
    flip_probability: float
    ulp1: float


@dataclass(frozen=True, slots=True)
class ChainStats:
    """Statistics over consecutive steps of one chain; every share lies in [0, 1].

    Attributes:
        numel: Elements of the model.
        steps: Steps measured.
        median_weight: Median of |w| in the old bits of the first step.
        density: Changed elements of a step over all elements.
        ulp1: Share of changes by one unit in the last place.
        ulp2: Share of changes by at most two.
        recurrence: Share of changes whose element also changed in the step before.
        sign_kept: Of those, the share that moved in the same direction.
        exponents: One row for each exponent of the old bits that occurs, ascending.
    """

    numel: int
    steps: int
    median_weight: float
    density: float
    ulp1: float
    ulp2: float
    recurrence: float
    sign_kept: float
    exponents: tuple[ExponentRow, ...]


class _Tally:
    """Counts over tensors and steps. Exponent histograms are int64[256], by biased exponent."""

    def __init__(self) -> None:
        self.elements = np.zeros(256, np.int64)
        self.flips = np.zeros(256, np.int64)
        self.single = np.zeros(256, np.int64)
        self.at_most_two = 0
        self.followers = 0
        self.repeated = 0
        self.same_direction = 0

    def add(self, old: U16, new: U16, before: Steps16 | None) -> Steps16:
        moves = (new - old).view(np.int16)
        indices = np.flatnonzero(moves)
        changed = moves[indices]
        exponents = biased_exponents(old[indices])
        magnitudes = np.abs(changed.astype(np.int32))
        self.elements += np.bincount(biased_exponents(old), minlength=256)
        self.flips += np.bincount(exponents, minlength=256)
        self.single += np.bincount(exponents[magnitudes == 1], minlength=256)
        self.at_most_two += int(np.count_nonzero(magnitudes <= 2))
        if before is not None:
            earlier = before[indices]
            moved = earlier != 0
            self.followers += indices.size
            self.repeated += int(np.count_nonzero(moved))
            self.same_direction += int(np.count_nonzero(moved & ((earlier > 0) == (changed > 0))))
        return moves

    def rows(self) -> tuple[ExponentRow, ...]:
        return tuple(
            ExponentRow(
                exponent=int(biased) - EXPONENT_BIAS,
                elements=_share(self.elements[biased], self.elements.sum()),
                flips=_share(self.flips[biased], self.flips.sum()),
                flip_probability=_share(self.flips[biased], self.elements[biased]),
                ulp1=_share(self.single[biased], self.flips[biased]),
            )
            for biased in np.flatnonzero(self.elements)
        )


def chain_stats(steps: Iterable[Step]) -> ChainStats:
    tally = _Tally()
    before: dict[str, Steps16] = {}
    first: Step | None = None
    count = 0
    for step in steps:
        count += 1
        first = step if first is None else first
        before = {name: tally.add(old, new, before.get(name)) for name, (old, new) in step.items()}
    if first is None:
        raise ConfigError("a chain without steps has no statistics")
    changes = int(tally.flips.sum())
    return ChainStats(
        numel=sum(old.size for old, _ in first.values()),
        steps=count,
        median_weight=_median_weight(first),
        density=_share(changes, tally.elements.sum()),
        ulp1=_share(tally.single.sum(), changes),
        ulp2=_share(tally.at_most_two, changes),
        recurrence=_share(tally.repeated, tally.followers),
        sign_kept=_share(tally.same_direction, tally.repeated),
        exponents=tally.rows(),
    )


def biased_exponents(bits: U16) -> npt.NDArray[np.uint8]:
    return ((bits >> 7) & 0xFF).astype(np.uint8)


def _median_weight(step: Step) -> float:
    """Median of |w|: magnitudes of bf16 order as their bits do."""
    counts = np.zeros(1 << 15, np.int64)
    for old, _ in step.values():
        counts += np.bincount(old & 0x7FFF, minlength=1 << 15)
    middle = np.searchsorted(np.cumsum(counts), counts.sum() / 2)
    return float(np.array([middle << 16], np.uint32).view(np.float32)[0])


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0


Counts: TypeAlias = npt.NDArray[np.int64]

CLASSES: Final = 16


@dataclass(frozen=True, slots=True)
class EntropyLimits:
    """Limits in bits a change.

    Attributes:
        density: Changed elements over all elements, in [0, 1].
        positions: Which elements changed, if all are alike: H(p) / p.
        positions_given_exponent: The same, where the reader knows every old exponent.
        sign: Direction of a change; no context known to the reader predicts it.
        magnitude: Units in the last place moved, order 0.
        magnitude_given_exponent: The same, where the reader knows the old exponent.
    """

    density: float
    positions: float
    positions_given_exponent: float
    sign: float
    magnitude: float
    magnitude_given_exponent: float

    @property
    def stateless(self) -> float:
        return self.positions_given_exponent + self.sign + self.magnitude_given_exponent

    @property
    def without_base(self) -> float:
        return self.positions + self.sign + self.magnitude


def entropy_limits(step: Step) -> EntropyLimits:
    elements = np.zeros(256, np.int64)
    exponents, moves = [], []
    for old, new in step.values():
        difference = (new - old).view(np.int16)
        changed = np.flatnonzero(difference)
        elements += np.bincount(biased_exponents(old), minlength=256)
        exponents.append(biased_exponents(old[changed]))
        moves.append(difference[changed])
    move = np.concatenate(moves).astype(np.int32)
    if not move.size:
        raise ConfigError("an update that changes nothing has no bits a change")
    lowest = _lowest_class(elements)
    numel = np.bincount(_classes(np.arange(256), lowest), weights=elements, minlength=CLASSES)
    kind = _classes(np.concatenate(exponents), lowest)
    changes = np.bincount(kind, minlength=CLASSES)
    magnitude = np.abs(move)
    return EntropyLimits(
        density=move.size / float(elements.sum()),
        positions=_position_bits(changes.sum(keepdims=True), numel.sum(keepdims=True)) / move.size,
        positions_given_exponent=_position_bits(changes, numel) / move.size,
        sign=_symbol_bits(np.bincount(move > 0)) / move.size,
        magnitude=_symbol_bits(np.bincount(magnitude)) / move.size,
        magnitude_given_exponent=sum(
            _symbol_bits(np.bincount(magnitude[kind == one])) for one in range(CLASSES)
        )
        / move.size,
    )


@dataclass(frozen=True, slots=True)
class CodeLimits:
    """Limits of updates of 8-bit codes, in bits a changed code.

    Attributes:
        density: Changed codes over all codes, in [0, 1].
        positions: Which codes changed, if all are alike: H(p) / p.
        positions_given_code: The same, where the reader knows every old code.
        move: Difference of the bits of new and old code, order 0.
        move_given_code: The same, where the reader knows the old code.
    """

    density: float
    positions: float
    positions_given_code: float
    move: float
    move_given_code: float

    @property
    def stateless(self) -> float:
        return self.positions_given_code + self.move_given_code

    @property
    def without_base(self) -> float:
        return self.positions + self.move


def code_limits(step: Mapping[str, tuple[Bits, Bits]]) -> CodeLimits:
    numel = np.zeros(256, np.int64)
    moved = np.zeros((256, 256), np.int64)
    for old, new in step.values():
        if old.itemsize == 1:
            numel += np.bincount(old, minlength=256)
            changed = np.flatnonzero(old != new)
            pair = old[changed].astype(np.int64) << 8 | (new[changed] - old[changed])
            moved += np.bincount(pair, minlength=1 << 16).reshape(256, 256)
    changes = moved.sum(1)
    total = int(changes.sum())
    if not total:
        raise ConfigError("an update that changes nothing has no bits a change")
    return CodeLimits(
        density=total / float(numel.sum()),
        positions=_position_bits(changes.sum(keepdims=True), numel.sum(keepdims=True)) / total,
        positions_given_code=_position_bits(changes, numel) / total,
        move=_symbol_bits(moved.sum(0)) / total,
        move_given_code=sum(map(_symbol_bits, moved)) / total,
    )


def _lowest_class(elements: Counts) -> int:
    """Biased exponent of class 0, so that 0.1 % of the elements lie above the last but one."""
    top = int(np.searchsorted(np.cumsum(elements), 0.999 * elements.sum()))
    return max(0, top - (CLASSES - 2))


def _classes(exponents: npt.NDArray[Any], lowest: int) -> npt.NDArray[np.int64]:
    return np.clip(exponents.astype(np.int64) - lowest, 0, CLASSES - 1)


def _position_bits(changes: npt.NDArray[Any], numel: npt.NDArray[Any]) -> float:
    """Bits that say which elements of each class changed: the sum of ``n H(k / n)``."""
    stays = numel - changes
    return float(_plogp(numel) - _plogp(changes) - _plogp(stays))


def _symbol_bits(counts: Counts) -> float:
    return float(_plogp(counts.sum(keepdims=True)) - _plogp(counts))


def _plogp(counts: npt.NDArray[Any]) -> float:
    positive = counts[counts > 0].astype(np.float64)
    return float(np.sum(positive * np.log2(positive)))
