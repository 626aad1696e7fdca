"""Compilation of kernels by numba: one core, no GIL, compiled once and cached on disk.

The cache is numba's own: beside the source, in the folder of the user, or in ``NUMBA_CACHE_DIR``.
Processes that start together, as the ranks of an engine do, compile each kernel once: the others
wait for the first and read its result.
"""

import errno
import fcntl
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from threading import RLock
from typing import Any, Final, TypeVar

import numba
from numba.core import event
from typing_extensions import override

logger = logging.getLogger(__name__)

ROOM: Final = 1 << 20
"""Bytes that must fit beside the source, or in ``NUMBA_CACHE_DIR``: kernels take less each."""

PATIENCE_S: Final = 60.0  # longest wait for another process, which may be stopped

_F = TypeVar("_F", bound=Callable[..., Any])

_njit: Final[Any] = numba.njit  # untyped up to numba 0.67, too narrow since
_event: Final[Any] = event  # also untyped


class _Told(_event.Listener):  # type: ignore[misc]  # see there
    """Says once in a process that kernels are compiled."""

    @override
    def on_start(self, event: object) -> None:
        _tell()

    @override
    def on_end(self, event: object) -> None:
        """Nothing is said of the end."""


@cache
def _tell() -> None:
    logger.info("compiling kernels, which takes seconds once on this machine")


_event.register("numba:compile", _Told())


@cache
def _warn(cause: str) -> None:
    logger.warning("compiled kernels are not kept, each process compiles them anew: %s", cause)


@cache
def _has_room() -> bool:
    """Return whether a disk is not full, which numba finds out when it writes a kernel."""
    folder = Path(os.environ.get("NUMBA_CACHE_DIR") or Path(__file__).parent)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as probe:
            probe.write(bytes(ROOM))
            probe.flush()
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            _warn(str(exc))
            return False
    return True  # where nothing may be written, numba looks for another folder


def compiled(function: _F) -> _F:
    """Compile a function on its first call, without the GIL."""
    found: Any
    try:
        found = _njit(nogil=True, cache=_has_room())(function)
    except RuntimeError as exc:  # no folder may be written
        _warn(str(exc))
        found = _njit(nogil=True)(function)
    compile_, name = found.compile, f"{function.__module__}.{function.__qualname__}"

    def compile_once(signature: Any) -> Any:  # noqa: ANN401
        with _turns, _turn(zlib.crc32(name.encode())):
            return compile_(signature)

    found.compile = compile_once  # looks into the cache first
    kernel: _F = found
    return kernel


_turns: Final = RLock()  # around the locks of files, which threads of one process share


@cache
def _turns_file() -> int | None:
    """Open a file with a lock for each kernel; it stays open, since closing it drops all locks."""
    folder = Path(os.environ.get("NUMBA_CACHE_DIR") or Path(__file__).parent / "__pycache__")
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        return os.open(folder / "kernels.lock", os.O_RDWR | os.O_CREAT, 0o644)
    return None


@contextmanager
def _turn(number: int) -> Iterator[None]:
    """Wait while another process compiles this kernel; without locks, or patience, go on."""
    file, deadline = _turns_file(), time.monotonic() + PATIENCE_S
    while file is not None and time.monotonic() < deadline:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
            break
        except (BlockingIOError, PermissionError):
            time.sleep(0.02)
        except OSError:  # a file system without locks
            break
    try:
        yield
    finally:
        if file is not None:
            with suppress(OSError):
                fcntl.lockf(file, fcntl.LOCK_UN, 1, number)


def inlined(function: _F) -> _F:
    """Inline a function that runs once a block: array arguments cost a sixth of the diff."""
    found: _F = _njit(inline="always")(function)
    return found
