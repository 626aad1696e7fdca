"""The bits of one tensor in a weights file: read through a memory map, written by ``pwrite``.

If the disk is full, a write through a memory map kills the process with SIGBUS, whereas ``pwrite``
fails with an error. Holes, copy-on-write blocks and quotas cause this in files of full length as
well, so every map here is read-only.
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
"""Bytes of one read-modify-write."""


class FileBits:
    """Flat bits of one tensor in a file.

    Args:
        file: Weights file.
        offset: Offset of the tensor's first byte.
        spec: Spec of the tensor.
    """

    def __init__(self, file: Path, offset: int, spec: TensorSpec) -> None:
        self.file = file
        self._offset = offset
        self._spec = spec

    @cached_property
    def bits(self) -> Bits:
        """Read-only map of the current bits, later writes included."""
        if not self._spec.numel:  # nothing to map
            return np.empty(0, self._spec.bits_dtype)
        return np.memmap(self.file, self._spec.bits_dtype, "r", self._offset, (self._spec.numel,))

    def put(self, indices: Indices | None, new: Bits) -> None:
        """Write elements, or all of them if ``indices`` is ``None``.

        Args:
            indices: Flat int64 indices, strictly increasing.
            new: New bits of these elements.

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
