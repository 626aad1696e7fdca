"""Thinning of long series to what a chart can show."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from deltachain.dashboard.phases import PhaseTimes
from deltachain.dashboard.version_summary import VersionSummary

POINTS: Final = 2000
"""Largest number of versions in one chart."""

_T = TypeVar("_T")


def thinned(columns: Sequence[npt.NDArray[np.float64]], most: int) -> list[int]:
    """Choose positions of long columns such that a chart of them looks like one of all.

    The first and the last position are chosen, and of each of equal ranges between them the
    smallest and the largest value of each column. All are chosen if they are not more than
    ``most``.

    Args:
        columns: Equally long columns of finite numbers.
        most: Largest number of positions; at least 2 and twice the number of columns.

    Returns:
        Positions, ascending.
    """
    length = len(columns[0])
    if length <= most:
        return list(range(length))
    ranges = max((most - 2) // (2 * len(columns)), 1)
    bounds = np.linspace(0, length, ranges + 1).astype(int)
    chosen = {0, length - 1}
    for column in columns:
        for first, end in pairwise(bounds.tolist()):
            chosen |= {int(first + column[first:end].argmin())}
            chosen |= {int(first + column[first:end].argmax())}
    return sorted(chosen)


def thinned_versions(
    rows: Sequence[VersionSummary], times: Sequence[PhaseTimes], most: int = POINTS
) -> list[int]:
    """Choose positions of versions such that charts of them look like those of all.

    Args:
        rows: The versions.
        times: Phase times of each of them.
        most: Largest number of positions.
    """
    if len(rows) <= most:
        return list(range(len(rows)))
    density = np.array([row.density for row in rows])
    nbytes = np.array([row.nbytes for row in rows], dtype=np.float64)
    seconds = np.array([sum(one.values()) for one in times], dtype=np.float64)
    return thinned((density, nbytes, seconds), most)


def spread(values: Sequence[_T], most: int) -> list[_T]:
    """Choose at most ``most`` values at equal distances, the last one always."""
    if len(values) <= most:
        return list(values)
    return [values[-1 - place * len(values) // most] for place in range(most)][::-1]
