"""Bit statistics of a chain's updates, as reported for published runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from deltachain.errors import ConfigError
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
