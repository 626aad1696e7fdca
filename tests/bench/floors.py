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
    found = np.uint64(0)
    for i in range(one.shape[0]):
        found |= one[i] ^ other[i]
    return found


@_jit
def read_master(snapshot: Any, master: Any) -> Any:
    found = np.uint64(0)
    for i in range(snapshot.shape[0]):
        found |= master[2 * i] ^ master[2 * i + 1] ^ snapshot[i]
    return found


@_jit
def read_weights(codes: Any, weights: Any) -> Any:
    found = np.uint64(0)
    for i in range(codes.shape[0]):
        found |= codes[i]
    for i in range(weights.shape[0]):
        found ^= weights[i]
    return found
