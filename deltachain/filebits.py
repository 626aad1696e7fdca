"""The bits of one tensor in a weights file: read and written by calls.

Where the disk is full, or another process cut the file, access through a memory map kills the
process with SIGBUS, whereas a call fails with an error.
"""

import errno
import os
from collections.abc import Iterator
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

    @property
    def bits(self) -> Bits:
        """Read the current bits into new, read-only memory."""
        bits = self._read(0, self._spec.numel)
        bits.flags.writeable = False
        return bits

    def bits_near(self, indices: Indices) -> Bits:
        """Read the bits of elements at increasing indices, and near them; the rest is any bits."""
        window = WINDOW_NBYTES // self._spec.itemsize
        bits = np.empty(self._spec.numel, self._spec.bits_dtype)
        for start, stop in _runs(np.unique(indices // window)):
            block = bits[start * window : stop * window]
            self._range.read_into(start * window * self._spec.itemsize, block.view(np.uint8).data)
        bits.flags.writeable = False
        return bits

    def _read(self, start: int, stop: int) -> Bits:
        bits = np.empty(min(stop, self._spec.numel) - start, self._spec.bits_dtype)
        if bits.size:
            self._range.read_into(start * self._spec.itemsize, bits.view(np.uint8).data)
        return bits

    def put(self, indices: Indices | None, new: Bits) -> None:
        if not new.size:
            return
        descriptor = os.open(self.file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "r+b", buffering=0) as out:
            if os.fstat(descriptor).st_ino != self._inode:  # its tensors may lie elsewhere
                raise OSError(errno.ESTALE, "another file was put in its place", str(self.file))
            if indices is None:
                self._write(out.fileno(), 0, new)
                return
            window = WINDOW_NBYTES // self._spec.itemsize
            starts = np.unique(indices // window) * window
            first = np.searchsorted(indices, starts)
            for start, low, high in zip(starts, first, [*first[1:], indices.size], strict=True):
                block = self._read(int(start), int(start) + window)
                host.scatter_(block, indices[low:high] - start, new[low:high])
                self._write(out.fileno(), int(start), block)

    def _write(self, descriptor: int, at: int, bits: Bits) -> None:
        left = np.ascontiguousarray(bits).view(np.uint8).data
        where = self._range.offset + at * self._spec.itemsize
        while left:
            done = os.pwrite(descriptor, left, where)
            left, where = left[done:], where + done


def _runs(numbers: Indices) -> Iterator[tuple[int, int]]:
    ends = np.flatnonzero(np.diff(numbers) != 1) + 1
    for run in np.split(numbers, ends):
        if run.size:
            yield int(run[0]), int(run[-1]) + 1
