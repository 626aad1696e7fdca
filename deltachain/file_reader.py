"""Files of others, read by calls: who cuts one meanwhile causes an error here.

A read through a memory map, behind the end of a file that was cut, kills the process with SIGBUS,
and each map holds a descriptor. Here a file is opened for each read.
"""

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from deltachain.errors import ConfigError, MalformedError
from deltachain.types import Bits

_CHANGED_HINT: Final = (
    "let no other process write to this file while it is read: write a checkpoint to a new folder, "
    "and name that folder when it is complete"
)


class FileRange:
    def __init__(self, file: Path, offset: int = 0) -> None:
        self.file, self.offset = file, offset

    def read_into(self, at: int, out: memoryview) -> os.stat_result:
        """Fill ``out`` with the bytes from ``at`` on; return the file's status afterwards."""
        descriptor = os.open(self.file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            where, left = self.offset + at, out
            while left:
                done = os.preadv(descriptor, [left], where)
                if not done:
                    raise MalformedError(
                        f"{self.file} was cut while it was read: it ends at byte {where}",
                        key=str(self.file),
                        hint=_CHANGED_HINT,
                    )
                left, where = left[done:], where + done
            return os.fstat(descriptor)
        finally:
            os.close(descriptor)


class FileReader:
    """A file whose ``nbytes`` must stay as they are while it is read."""

    def __init__(self, file: Path) -> None:
        self._range = FileRange(file)
        try:
            status = file.stat()
            with file.open("rb"):
                pass
        except OSError as exc:
            hint = "check the path, and who may read it"
            raise ConfigError(f"{file}: {exc.strerror}", hint=hint) from exc
        self.nbytes, self._mark = status.st_size, _mark(status)
        if not self.nbytes:
            raise MalformedError(f"{file} is empty", key=str(file))

    def read_at(self, start: int, length: int) -> memoryview:
        out = np.empty(max(0, min(length, self.nbytes - start)), np.uint8)
        self._fill(start, out)
        return out.data

    def bits(
        self,
        start: int,
        stop: int,
        dtype: np.dtype[np.unsignedinteger],
        make: Callable[..., Bits] = np.empty,
    ) -> Bits:
        out = make((stop - start) // dtype.itemsize, dtype)
        self._fill(start, out)
        return out

    def _fill(self, start: int, out: Bits) -> None:
        if not out.size:
            return
        file = self._range.file
        try:
            status = self._range.read_into(start, out.view(np.uint8).data)
        except OSError as exc:
            raise ConfigError(f"{file}: {exc.strerror}", hint=_CHANGED_HINT) from exc
        if _mark(status) != self._mark:
            raise MalformedError(
                f"{file} was written to or replaced while it was read",
                key=str(file),
                hint=_CHANGED_HINT,
            )


def _mark(status: os.stat_result) -> tuple[int, ...]:
    """Return what differs once a file has other bytes, or another file has its name."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def map_file(path: Path) -> memoryview:
    """Map a file of a spool, which no other program writes to; readable after its removal."""
    try:
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except ValueError as exc:  # mmap's error for an empty file
        raise MalformedError(f"{path} is empty", key=str(path)) from exc
    except OSError as exc:
        hint = "check the path, and who may read it"
        raise ConfigError(f"{path}: {exc.strerror}", hint=hint) from exc
