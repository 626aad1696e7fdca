"""Memory that this process has freed: kept for a while, or given back to the system."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # parameters of glibc's ``mallopt``

MAPPED: Final = 32 << 20
"""Bytes of memory that is mapped by itself, and given back when it is freed: glibc's maximum."""


def tell_malloc(function: str, *arguments: int) -> None:
    with suppress(AttributeError, OSError):  # C libraries other than glibc have no such settings
        getattr(ctypes.CDLL(None), function)(*arguments)


def trim_memory() -> None:
    """Give freed memory back to the system."""
    tell_malloc("malloc_trim", 0)


@contextmanager
def reusing_memory() -> Iterator[None]:
    """Keep freed memory for the next tensors: new pages cost more than what is loaded into them."""
    tell_malloc("mallopt", MMAP_THRESHOLD, MAPPED)
    tell_malloc("mallopt", TRIM_THRESHOLD, (1 << 31) - 1)
    try:
        yield
    finally:
        tell_malloc("mallopt", TRIM_THRESHOLD, 2 * MAPPED)
