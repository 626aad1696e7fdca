"""Compilation of kernels by numba: one core, no GIL, compiled once and cached on disk."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, TypeVar

import numba
from numba.core import caching
from typing_extensions import override

logger = logging.getLogger(__name__)

_F = TypeVar("_F", bound=Callable[..., Any])

_FunctionCache: Final[Any] = caching.FunctionCache  # also untyped
_njit: Final[Any] = numba.njit  # untyped up to numba 0.67, too narrow since


class _Cache(_FunctionCache):  # type: ignore[misc]  # see there
    """Cache of compiled kernels on disk; without one, every process compiles them anew."""

    @override
    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as exc:
            _warn(exc)

    @override
    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except OSError as exc:
            _warn(exc)
            return None


def _warn(cause: Exception) -> None:
    if not _warned:
        _warned.append(True)
        logger.warning("compiled kernels are not kept, each process compiles them anew: %s", cause)


_warned: Final[list[bool]] = []


def compiled(function: _F) -> _F:
    """Compile a function on its first call, without the GIL."""
    found: Any = _njit(nogil=True)(function)
    try:
        found._cache = _Cache(function)  # as in numba's enable_caching
    except (OSError, RuntimeError) as exc:  # no writable folder
        _warn(exc)
    kernel: _F = found
    return kernel


def inlined(function: _F) -> _F:
    """Inline a function that runs once a block: array arguments cost a sixth of the diff."""
    found: _F = _njit(inline="always")(function)
    return found
