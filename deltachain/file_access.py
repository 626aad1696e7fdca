"""Files that others may write to, read and written by calls: a cut or a full disk is an error.

Access through a memory map then kills the process with SIGBUS, and each map holds a descriptor.
Here a file is opened for each call.
"""

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from deltachain.errors import ConfigError, MalformedError
from deltachain.kernels import host
from deltachain.types import Bits, Indices, TensorSpec

WINDOW_NBYTES: Final = 256 << 10  # bytes of one read-modify-write

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


class FileBits:
    """The bits of one tensor in a weights file."""

    def __init__(self, file: Path, offset: int, spec: TensorSpec) -> None:
        self.file = file
        self._inode = file.stat().st_ino
        self._range = FileRange(file, offset)
        self._spec = spec

    def read(self, start: int, stop: int) -> Bits:
        """Read the current bits of the elements ``[start, stop)`` into new memory."""
        bits = np.empty(min(stop, self._spec.numel) - start, self._spec.bits_dtype)
        if bits.size:
            self._range.read_into(start * self._spec.itemsize, bits.view(np.uint8).data)
        return bits

    def put(self, indices: Indices | None, new: Bits, start: int = 0) -> None:
        """Write bits at increasing indices, or at all from ``start`` on."""
        if not new.size:
            return
        descriptor = os.open(self.file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "r+b", buffering=0) as out:
            if os.fstat(descriptor).st_ino != self._inode:  # its tensors may lie elsewhere
                raise OSError(errno.ESTALE, "another file was put in its place", str(self.file))
            if indices is None:
                self._write(out.fileno(), start, new)
                return
            window = WINDOW_NBYTES // self._spec.itemsize
            starts = np.unique(indices // window) * window
            first = np.searchsorted(indices, starts)
            for at, low, high in zip(starts, first, [*first[1:], indices.size], strict=True):
                block = self.read(int(at), int(at) + window)
                host.scatter_(block, indices[low:high] - at, new[low:high])
                self._write(out.fileno(), int(at), block)

    def _write(self, descriptor: int, at: int, bits: Bits) -> None:
        left = np.ascontiguousarray(bits).view(np.uint8).data
        where = self._range.offset + at * self._spec.itemsize
        while left:
            done = os.pwrite(descriptor, left, where)
            left, where = left[done:], where + done


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
