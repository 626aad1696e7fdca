"""Emission of changes by the kernels of a diff on the host, a block of elements at a time.

A block is compared to one byte an element, which LLVM vectorises; eight such bytes are read as one
word, and only non-zero words are examined. What differs is copied to the snapshot, and appended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from deltachain.kernels.compiling import compiled, inlined
from deltachain.kernels.reference import Changes
from deltachain.types import Bits

BLOCK: Final = 512
"""Elements compared at a time, few enough for a fully unrolled comparison with short memory stalls:
at 1.2 % density, 256 and 1024 were a fifth slower (2026-11, AMD EPYC)."""

_U = np.uint64
_LOWEST_BYTE: Final = _U(sum(j << (56 - 8 * j) for j in range(8)))
"""Multiplier: ``(lowest set bit of a word of 0/1 bytes) * this >> 56`` is the byte's number."""


@inlined
def emit(current: Any, snapshot: Any, at: int, out: Any, scratch: Any, count: int) -> int:  # noqa: ANN401
    """Compare one block, copy changes to the snapshot, and append them to ``out``."""
    indices, old, new = out
    mask, words, dirty = scratch
    for i in range(BLOCK):
        mask[i] = current[i] != snapshot[i]
    d = 0
    for w in range(BLOCK // 8):
        dirty[d] = w
        d += words[w] != _U(0)
    for q in range(d):
        word, first = words[dirty[q]], _U(8 * dirty[q])
        while word != _U(0):
            lowest = word & (~word + _U(1))
            i = first + ((lowest * _LOWEST_BYTE) >> _U(56))
            indices[count] = at + i
            new[count] = current[i]
            old[count] = snapshot[i]
            snapshot[i] = current[i]
            count += 1
            word ^= lowest
    return count


@compiled
def emit_rest(current: Any, snapshot: Any, at: int, out: Any, count: int) -> int:  # noqa: ANN401
    """Run :func:`emit` on fewer elements than a block."""
    indices, old, new = out
    for i in range(snapshot.shape[0]):
        if current[i] != snapshot[i]:
            indices[count] = at + i
            new[count] = current[i]
            old[count] = snapshot[i]
            snapshot[i] = current[i]
            count += 1
    return count


def drive(kernel: Callable[[int, Any], tuple[int, int]], snapshot: Bits) -> tuple[Changes, bool]:
    """Run a diff kernel to the end in buffers of bounded size; join the changes.

    Unwritten memory is never committed, so each buffer has room for a density of 3 %.

    Args:
        kernel: Called with the element to start at, and with room for indices, old and new bits;
            returns where it ended, at least a block before that room was full, and the number of
            changes. A negative end is a refusal.
        snapshot: Flat bits that the kernel updates.

    Returns:
        All changes, and whether nothing was refused; otherwise there are no changes, and the
        snapshot is as it was.
    """
    found: list[Changes] = []
    size = max(4 * BLOCK, snapshot.size // 32)
    at, dtype = 0, snapshot.dtype
    while not found or 0 <= at < snapshot.size:
        indices, old, new = np.empty(size, np.int64), np.empty(size, dtype), np.empty(size, dtype)
        at, count = kernel(at, (indices, old, new))
        found.append(Changes(indices[:count], old[:count], new[:count]))
    if at < 0:
        for changes in found:
            snapshot[changes.indices] = changes.old
        indices, old, new = found[0]
        return Changes(indices[:0], old[:0], new[:0]), False
    if len(found) == 1:
        return found[0], True
    return Changes(*(np.concatenate(column) for column in zip(*found, strict=True))), True
