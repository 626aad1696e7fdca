"""Memory of many arrays in few large pieces, which the system gives in large pages.

A fresh page costs more than what is written into it: with pages of 4 KiB, decoding a model took
twice as long. numpy asks for large pages itself, but gets them only inside of large arrays.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Final

import numpy as np
import numpy.typing as npt

NBYTES: Final = 1 << 26
"""Bytes of a piece of memory."""

SMALL: Final = 1 << 16
"""Bytes below which an array has memory of its own, as it has above a quarter of a piece."""

ALIGNMENT: Final = 64

_local = threading.local()


def empty(count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return a ``(count,)`` array with any content.

    It shares a piece of memory with the arrays that this thread asks for next; the piece is
    released with the last of them.
    """
    kind = np.dtype(dtype)
    nbytes = count * kind.itemsize
    if not SMALL <= nbytes <= NBYTES // 4:
        return np.empty(count, kind)
    known, at = getattr(_local, "piece", (lambda: None, 0))
    piece = known()
    if piece is None or at + nbytes > NBYTES:
        piece, at = np.empty(NBYTES, np.uint8), 0
        known = weakref.ref(piece)
    _local.piece = known, at + nbytes + -nbytes % ALIGNMENT
    found: npt.NDArray[Any] = piece[at : at + nbytes].view(kind)
    return found
