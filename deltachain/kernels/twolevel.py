"""The reference kernels with a faster diff in numpy alone, for hosts without numba.

Words of eight bytes are compared first and only those that differ are looked into: at 1 % density
about one word in twenty. Everything else is already a few vectorised passes over the changes.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from deltachain.kernels.reference import (
    Changes,
    cast_bf16,
    decode_gaps,
    digest,
    digest_at,
    encode_gaps,
    gather,
    join_steps,
    scatter_,
    split_steps,
)
from deltachain.types import Bits

__all__ = [
    "NAME",
    "cast_bf16",
    "cast_diff_",
    "decode_gaps",
    "diff_",
    "digest",
    "digest_at",
    "encode_gaps",
    "gather",
    "join_steps",
    "scatter_",
    "split_steps",
]

NAME: Final = "numpy"
CHUNK: Final = 1 << 20
"""Bytes of each operand compared at a time, so that the second look finds them in cache."""


def diff_(snapshot: Bits, current: Bits) -> Changes:
    """As ``reference.diff_``."""
    return _chunks(snapshot, current, lambda chunk: chunk)


def cast_diff_(snapshot: Bits, master: npt.NDArray[np.float32]) -> Changes:
    """As ``reference.cast_diff_``, a chunk at a time."""
    return _chunks(snapshot, master, cast_bf16)


def _chunks(snapshot: Bits, current: npt.NDArray[Any], bits_of: Any) -> Changes:  # noqa: ANN401
    size = CHUNK // snapshot.itemsize
    found = [
        _diff_chunk(snapshot[at : at + size], bits_of(current[at : at + size]), at)
        for at in range(0, max(snapshot.size, 1), size)
    ]
    return Changes(*(np.concatenate(column) for column in zip(*found, strict=True)))


def _diff_chunk(snapshot: Bits, current: Bits, at: int) -> Changes:
    """Diff one chunk whose first element has flat index ``at``."""
    lanes = 8 // snapshot.itemsize
    whole = snapshot.size // lanes * lanes
    old_words, new_words = snapshot[:whole].view(np.uint64), current[:whole].view(np.uint64)
    words = np.flatnonzero(old_words != new_words)
    inside = old_words[words].view(snapshot.dtype) != new_words[words].view(snapshot.dtype)
    lane = np.flatnonzero(inside)
    rest = np.flatnonzero(snapshot[whole:] != current[whole:]) + whole
    indices = np.concatenate((words[lane // lanes] * lanes + lane % lanes, rest))
    changed = Changes(indices + at, snapshot[indices], current[indices])
    snapshot[indices] = changed.new
    return changed
