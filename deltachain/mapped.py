"""A file as memory, so that its size does not matter."""

from __future__ import annotations

import mmap
from pathlib import Path

from deltachain.errors import ConfigError, MalformedError


def map_file(path: Path) -> memoryview:
    """The bytes of a file, read as they are needed.

    Raises:
        ConfigError: It cannot be read.
        MalformedError: It is empty.
    """
    try:
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except ValueError as exc:  # what mmap says of nothing to map
        raise MalformedError(f"{path} is empty", key=str(path)) from exc
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror}") from exc
