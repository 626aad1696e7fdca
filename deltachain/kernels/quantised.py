"""Quantised windows: where their blocks are, and how a weight and a factor make a code."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeAlias

Rounding: TypeAlias = Literal["int8-divide", "fp8-divide", "fp8-multiply"]
"""Code of ``x``: int8 or fp8 e4m3 of ``bf16(x / factor)``, or fp8 e4m3 of ``x * factor``."""

KINDS: Final[dict[Rounding, int]] = {"int8-divide": 0, "fp8-divide": 1, "fp8-multiply": 2}
"""Number of each rounding in the kernels."""


class WindowBlocks(NamedTuple):
    """Where the blocks of a window are.

    Attributes:
        at: Row and column of the window's first weight in its first block.
        size: Rows and columns of a block.
    """

    at: tuple[int, int]
    size: tuple[int, int]
