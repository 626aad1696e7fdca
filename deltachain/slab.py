"""Memory of many arrays in few large pieces, which the system gives in large pages.

A fresh page costs more than what is written into it: with pages of 4 KiB, decoding a model took
twice as long. numpy asks for large pages itself, but gets them only inside of large arrays.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, Final

import numpy as np
import numpy.typing as npt

NBYTES: Final = 1 << 25
"""Bytes of a piece of memory."""

SMALL: Final = 1 << 16
"""Bytes below which an array has memory of its own, as it has above a quarter of a piece."""

REUSES: Final = sys.version_info < (3, 14)
"""Whether references are counted as expected below: later Pythons borrow some."""

ALIGNMENT: Final = 64
"""Bytes that the start of an array is a multiple of, within its piece."""

_local = threading.local()


def empty(count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return a ``(count,)`` array with any content.

    It shares a piece of memory with other arrays that this thread asked for. A piece is released
    with the last of them; a thread keeps its newest one, and begins it anew once nobody uses it.
    """
    kind = np.dtype(dtype)
    nbytes = count * kind.itemsize
    if not SMALL <= nbytes <= NBYTES // 4:
        return np.empty(count, kind)
    piece: npt.NDArray[np.uint8] | None = getattr(_local, "piece", None)
    at: int = getattr(_local, "at", 0)
    if REUSES and piece is not None and sys.getrefcount(piece) == 3:  # here, _local, the argument
        at = 0
    if piece is None or at + nbytes > NBYTES:
        piece, at = np.empty(NBYTES, np.uint8), 0
    _local.piece, _local.at = piece, at + nbytes + -nbytes % ALIGNMENT
    found: npt.NDArray[Any] = piece[at : at + nbytes].view(kind)
    return found
