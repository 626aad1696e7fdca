"""Baselines of finding changes: passes that read every byte once and store nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import numba
import numpy as np

_F = TypeVar("_F", bound=Callable[..., Any])
_njit: Final[Any] = numba.njit


def _jit(function: _F) -> _F:
    compiled: _F = _njit(nogil=True, cache=True)(function)
    return compiled


@_jit
def read_both(one: Any, other: Any) -> Any:
    """Compare two arrays of 64-bit words: zero if they are equal."""
    found = np.uint64(0)
    for i in range(one.shape[0]):
        found |= one[i] ^ other[i]
    return found


@_jit
def read_master(snapshot: Any, master: Any) -> Any:
    """Read both as 64-bit words, two of the fp32 master for one of the bf16 snapshot."""
    found = np.uint64(0)
    for i in range(snapshot.shape[0]):
        found |= master[2 * i] ^ master[2 * i + 1] ^ snapshot[i]
    return found


@_jit
def read_weights(codes: Any, weights: Any) -> Any:
    """Read the codes of a snapshot and the weights that they are made of, as 64-bit words."""
    found = np.uint64(0)
    for i in range(codes.shape[0]):
        found |= codes[i]
    for i in range(weights.shape[0]):
        found ^= weights[i]
    return found
