"""Arrays that kernels take and return, and constants of the state digest.

Arrays are flat; *bits* are unsigned integers of the element's width.
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from deltachain.types import Bits, Indices, StateDigest

PHI: Final = 0x9E3779B97F4A7C15
"""Odd multiplier of the element's position (2**64 divided by the golden ratio)."""

# Odd multipliers of the finaliser.
MIX_A: Final = 0xD6E8FEB86659FD93
MIX_B: Final = 0xA0761D6478BD642F

# What is wrong with streams that are refused.
LEAVES: Final = "gaps leave the segment"
CANONICAL: Final = "steps are not canonical"


class Changes(NamedTuple):
    """Changed elements as three ``(nnz,)`` arrays: flat int64 indices, old bits and new bits."""

    indices: Indices
    old: Bits
    new: Bits


class SplitSteps(NamedTuple):
    """Wrapping steps, split into arrays that compress well."""

    negative: npt.NDArray[np.bool_]  # top bit of each step, `(nnz,)` bool
    exception: npt.NDArray[np.bool_]  # whether the magnitude of each step is not 1, `(nnz,)` bool
    # Magnitude of each exception, 255 for 255 or more, `(exceptions,)` uint8.
    magnitude: npt.NDArray[np.uint8]
    wide: Bits  # the whole step for each magnitude of 255, `(wide,)` bits


class StepStreams(NamedTuple):
    """Streams of one tensor in the encoding ``step`` (FORMAT.md 4); contents are untrusted."""

    gaps: Bits  # gap entries, uint8 or uint16
    sign: npt.NDArray[np.uint8]  # bytes with the sign bits
    sign_at: int  # number of the first sign bit of the tensor in them
    exception: npt.NDArray[np.uint8]  # bytes with the exception bits
    exception_at: int  # number of the first exception bit of the tensor in them
    magnitude: npt.NDArray[np.uint8]  # magnitudes of the exceptions, uint8
    wide: Bits  # wide steps, bits of the tensor's width


class WindowPlace(NamedTuple):
    """Elements of a flat checkpoint tensor, and where they are in live storage."""

    offset: int  # flat index of the first element
    at: int  # its position in the storage
    # `(n, 3)` int64: size, stride in the tensor and stride in the storage of each dimension, by
    # descending stride in the tensor; no two elements have one flat index.
    dims: npt.NDArray[np.int64]


class StagedSteps(NamedTuple):
    """Steps of the elements of a box, ready to write."""

    positions: Indices  # `(n,)` int64 positions in the storage, in any order, each once
    old: Bits  # `(n,)` old bits
    new: Bits  # `(n,)` new bits
    added: StateDigest  # state digest of the new bits
    removed: StateDigest  # state digest of the old bits


class BrokenSegmentError(ValueError):
    """A segment of a batch breaks a rule of its encoding; ``number`` is its row in the table."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(why)
        self.number = number


class StagedBatch(NamedTuple):
    """Changes of many tensors, ready to write; the totals of ``(n,)`` elements."""

    positions: Indices  # `(n,)` int64 positions in the storages, grouped by block
    old: Bits  # `(n,)` old bits
    new: Bits  # `(n,)` new bits
    blocks: npt.NDArray[np.int64]  # `(blocks, 3)`: placement, first position and count
    # `(slots, 5)` uint64: lanes of the new and of the old bits, and number of elements.
    sums: npt.NDArray[np.uint64]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self)
