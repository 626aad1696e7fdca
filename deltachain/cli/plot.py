"""Plots of block characters, for terminals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

from rich.text import Text

HEIGHT: Final = 8
"""Lines of a plot."""

_EIGHTHS: Final = " ▁▂▃▄▅▆▇█"


def columns(
    title: str,
    values: Sequence[float],
    ends: tuple[str, str],
    say: Callable[[float], str],
    width: int,
) -> Text:
    """Draw a column for each value, or for the largest of several where there is no room.

    Args:
        title: What the values are.
        values: Numbers, at least 0.
        ends: Names of the first and the last value, below the plot.
        say: Formats a value.
        width: Columns of the terminal.
    """
    most = max(values, default=0.0)
    margin = max(len(say(most)), len(say(0.0))) + 1
    bars = _largest(values, max(width - margin, 8))
    eighths = [round(8 * HEIGHT * bar / most) if most else 0 for bar in bars]
    eighths = [max(size, 1) if bar else 0 for size, bar in zip(eighths, bars, strict=True)]
    lines = [title]
    for row in range(HEIGHT - 1, -1, -1):
        label = say(most) if row == HEIGHT - 1 else ""
        cells = "".join(_EIGHTHS[min(max(size - 8 * row, 0), 8)] for size in eighths)
        lines.append(f"{label:>{margin - 1}} {cells}".rstrip())
    first, last = ends
    lines.append(" " * margin + first + last.rjust(max(len(bars) - len(first), len(last) + 1)))
    return Text("\n".join(lines))


def _largest(values: Sequence[float], most: int) -> list[float]:
    """Return at most ``most`` values: the largest of each of equal ranges."""
    count = min(len(values), most)
    bounds = [place * len(values) // count for place in range(count + 1)] if count else [0]
    return [max(values[first:end]) for first, end in pairwise(bounds)]
