"""Compilation of kernels by numba: one core, no GIL, compiled once and cached on disk.

Processes that start together, as the ranks of a host do, wait for the one that compiles a kernel.
"""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import numba
from numba.core import caching
from numba.core.compiler_lock import global_compiler_lock
from typing_extensions import override

logger = logging.getLogger(__name__)

WAIT_S: Final = 60.0
"""Longest wait for another process that compiles the same kernel, in seconds."""

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
            found = super().load_overload(sig, target_context)
        except OSError as exc:
            _warn(exc)
            found = None
        if found is None:
            _tell()
        return found


def _warn(cause: Exception) -> None:
    if not _warned:
        _warned.append(True)
        logger.warning("compiled kernels are not kept, each process compiles them anew: %s", cause)


def _tell() -> None:
    if not _told:
        _told.append(True)
        logger.info("compiling kernels, which takes seconds once on this machine")


_warned: Final[list[bool]] = []
_told: Final[list[bool]] = []


def compiled(function: _F) -> _F:
    """Compile a function on its first call, without the GIL."""
    found: Any = _njit(nogil=True)(function)
    try:
        cache: Any = _Cache(function)
        found._cache = cache  # as in numba's enable_caching
        lock = Path(cache.cache_path) / f"{cache._impl.filename_base}.lock"
        found.compile = _in_turn(found.compile, lock)
    except (OSError, RuntimeError) as exc:  # no writable folder
        _warn(exc)
    kernel: _F = found
    return kernel


def _in_turn(compile_: Callable[..., Any], lock: Path) -> Callable[..., Any]:
    """Return a function that compiles a kernel, or loads what another process has compiled."""

    def in_turn(sig: object) -> object:
        # numba's lock first: who has it may need a kernel that another thread waits to compile.
        with global_compiler_lock, _turn(lock):
            return compile_(sig)

    return in_turn


@contextmanager
def _turn(lock: Path) -> Iterator[None]:
    """Wait until no other process has the lock, at most ``WAIT_S``, then take it if that works."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        held = lock.open("ab")
    except OSError:  # no room, or no right to write: nothing is cached
        yield
        return
    with held:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:  # the file system has no locks
                break
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(held, fcntl.LOCK_UN)  # a child forked meanwhile has it open too


def inlined(function: _F) -> _F:
    """Inline a function that runs once a block: array arguments cost a sixth of the diff."""
    found: _F = _njit(inline="always")(function)
    return found
