"""Memory-mapped files: objects of a spool, which no other program writes to.

They stay readable after the spool is removed. See :mod:`deltachain.file_reader` for other files.
"""

from __future__ import annotations

import mmap
from pathlib import Path

from deltachain.errors import ConfigError, MalformedError


def map_file(path: Path) -> memoryview:
    """Map a file into memory, read-only; pages are read on access."""
    try:
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except ValueError as exc:  # mmap's error for an empty file
        raise MalformedError(f"{path} is empty", key=str(path)) from exc
    except OSError as exc:
        hint = "check the path, and who may read it"
        raise ConfigError(f"{path}: {exc.strerror}", hint=hint) from exc
