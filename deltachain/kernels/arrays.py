"""Arrays that kernels take and return, and constants of the state digest.

Arrays are flat; *bits* are unsigned integers of the element's width.
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from deltachain.types import Bits, Indices, StateDigest

PHI: Final = 0x9E3779B97F4A7C15
"""Odd multiplier of the element's position (2**64 divided by the golden ratio)."""
MIX_A: Final = 0xD6E8FEB86659FD93
MIX_B: Final = 0xA0761D6478BD642F
"""Odd multipliers of the finaliser."""
LEAVES: Final = "gaps leave the segment"
CANONICAL: Final = "steps are not canonical"
"""What is wrong with streams that are refused."""


class Changes(NamedTuple):
    """Changed elements as three ``(nnz,)`` arrays: flat int64 indices, old bits and new bits."""

    indices: Indices
    old: Bits
    new: Bits


class SplitSteps(NamedTuple):
    """Wrapping steps, split into arrays that compress well.

    Attributes:
        negative: Top bit of each step, ``(nnz,)`` bool.
        exception: Whether the magnitude of each step is not 1, ``(nnz,)`` bool.
        magnitude: Magnitude of each exception, 255 for 255 or more, ``(exceptions,)`` uint8.
        wide: The whole step for each magnitude of 255, ``(wide,)`` bits.
    """

    negative: npt.NDArray[np.bool_]
    exception: npt.NDArray[np.bool_]
    magnitude: npt.NDArray[np.uint8]
    wide: Bits


class StepStreams(NamedTuple):
    """Streams of one tensor in the encoding ``step`` (FORMAT.md 4); contents are untrusted.

    Attributes:
        gaps: Gap entries, uint8 or uint16.
        sign: Bytes with the sign bits.
        sign_at: Number of the first sign bit of the tensor in them.
        exception: Bytes with the exception bits.
        exception_at: Number of the first exception bit of the tensor in them.
        magnitude: Magnitudes of the exceptions, uint8.
        wide: Wide steps, bits of the tensor's width.
    """

    gaps: Bits
    sign: npt.NDArray[np.uint8]
    sign_at: int
    exception: npt.NDArray[np.uint8]
    exception_at: int
    magnitude: npt.NDArray[np.uint8]
    wide: Bits


class WindowPlace(NamedTuple):
    """Elements of a flat checkpoint tensor, and where they are in live storage.

    Attributes:
        offset: Flat index of the first element.
        at: Its position in the storage.
        dims: ``(n, 3)`` int64: size, stride in the tensor and stride in the storage of each
            dimension, by descending stride in the tensor; no two elements have one flat index.
    """

    offset: int
    at: int
    dims: npt.NDArray[np.int64]


class StagedSteps(NamedTuple):
    """Steps of the elements of a box, ready to write.

    Attributes:
        positions: ``(n,)`` int64 positions in the storage, in any order, each once.
        old: ``(n,)`` old bits.
        new: ``(n,)`` new bits.
        added: State digest of the new bits.
        removed: State digest of the old bits.
    """

    positions: Indices
    old: Bits
    new: Bits
    added: StateDigest
    removed: StateDigest
