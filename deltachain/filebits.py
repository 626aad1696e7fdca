"""The bits of one tensor in a weights file: read through a map, written by calls.

A write through a map for which the disk has no room ends the process with SIGBUS; a call that
writes fails with an error. Holes, copies that share blocks and quotas make that happen in files of
full length, too, so no map here can be written to.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np

from deltachain.kernels import host
from deltachain.types import Bits, Indices, TensorSpec

WINDOW_NBYTES: Final = 256 << 10
"""Bytes that are read, changed and written back at a time."""


class FileBits:
    """Flat bits of one tensor where they lie in a file.

    Args:
        file: Of the weights.
        offset: Of the tensor's first byte.
        spec: Which tensor.
    """

    def __init__(self, file: Path, offset: int, spec: TensorSpec) -> None:
        self.file = file
        self._offset = offset
        self._spec = spec

    @cached_property
    def bits(self) -> Bits:
        """As they are now, whatever is written; a read-only map."""
        if not self._spec.numel:  # nothing to map
            return np.empty(0, self._spec.bits_dtype)
        return np.memmap(self.file, self._spec.bits_dtype, "r", self._offset, (self._spec.numel,))

    def put(self, indices: Indices | None, new: Bits) -> None:
        """Write elements, all of them where no indices are given.

        Args:
            indices: Strictly increasing.
            new: Their bits.

        Raises:
            OSError: The disk is full, gone, or may not be written to.
        """
        if not new.size:
            return
        with self.file.open("r+b", buffering=0) as out:
            if indices is None:
                self._write(out.fileno(), 0, new)
                return
            window = WINDOW_NBYTES // self._spec.itemsize
            starts = np.unique(indices // window) * window
            first = np.searchsorted(indices, starts)
            for start, low, high in zip(starts, first, [*first[1:], indices.size], strict=True):
                block = np.array(self.bits[start : start + window])
                host.scatter_(block, indices[low:high] - start, new[low:high])
                self._write(out.fileno(), int(start), block)

    def _write(self, descriptor: int, at: int, bits: Bits) -> None:
        left = np.ascontiguousarray(bits).view(np.uint8).data
        where = self._offset + at * self._spec.itemsize
        while left:
            done = os.pwrite(descriptor, left, where)
            left, where = left[done:], where + done
