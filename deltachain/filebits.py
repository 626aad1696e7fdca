"""The bits of one tensor in a weights file: read and written by calls.

Where the disk is full, or another process cut the file, access through a memory map kills the
process with SIGBUS, whereas a call fails with an error.
"""

import errno
import os
from pathlib import Path
from typing import Final

import numpy as np

from deltachain.file_reader import FileRange
from deltachain.kernels import host
from deltachain.types import Bits, Indices, TensorSpec

WINDOW_NBYTES: Final = 256 << 10  # bytes of one read-modify-write


class FileBits:
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
