"""Signs that another process wrote to files: their inodes, sizes and times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

Stamps: TypeAlias = Mapping[Path, tuple[int, int, int]]
"""Inode, size in bytes and time of change in nanoseconds, by file."""


def stamps_of(files: Iterable[Path]) -> Stamps:
    """Return the stamps of files that exist.

    Raises:
        OSError: A file cannot be examined.
    """
    stamps = {}
    for file in files:
        with suppress(FileNotFoundError):
            found = file.stat()
            stamps[file] = (found.st_ino, found.st_size, found.st_mtime_ns)
    return stamps


def are_same_files(before: Stamps, after: Stamps) -> bool:
    """Return whether all files are those from before, of the same size, whenever written to."""
    return {f: s[:2] for f, s in before.items()} == {f: s[:2] for f, s in after.items()}
