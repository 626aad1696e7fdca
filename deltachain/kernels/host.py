"""Kernels on the host: numba if installed, the reference otherwise.

The same contract test compares both with ``reference``, bit for bit; ``NAME`` is the one in use,
for receipts. They are imported on first use: numba is slow to import, and vLLM 0.32 cannot start
an engine in a process that has imported it (its scan for Triton kernels mistakes llvmlite's
library object for one). The functions below need numpy only; together they are the
:class:`.protocol.BitKernels` of the host, which says what they do.
"""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from deltachain.kernels import reference

if TYPE_CHECKING:
    from deltachain.kernels.reference import *  # noqa: F403 - the same names, whichever is chosen


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name != "NAME" and not (name.islower() and callable(getattr(reference, name, None))):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # The names in the reference are the only list of kernels.
    chosen = "numba_kernels" if find_spec("numba") is not None else "reference"
    kernel = getattr(import_module(f"deltachain.kernels.{chosen}"), name)
    globals()[name] = kernel
    return kernel


def overwrite_(weights: npt.NDArray[Any], bits: npt.NDArray[Any]) -> None:
    weights[...] = bits


def copy(bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return bits.copy()


def equal(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    if one.flags.c_contiguous and other.flags.c_contiguous and not one.nbytes % 8:
        one, other = one.reshape(-1).view(np.uint64), other.reshape(-1).view(np.uint64)
    return bool((one == other).all())


def receive(array: Any, live: npt.NDArray[Any]) -> npt.NDArray[Any]:  # noqa: ANN401 - see BitKernels
    """Return an array on the host; the signed bits of a tensor become unsigned."""
    if isinstance(array, np.ndarray):
        return array
    bits: npt.NDArray[Any] = array.cpu().numpy()
    return bits.view(live.dtype) if bits.itemsize == live.itemsize else bits


def flat(bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(bits).reshape(-1)


def strided(
    flat: npt.NDArray[Any], offset: int, shape: Sequence[int], stride: Sequence[int]
) -> npt.NDArray[Any]:
    if not prod(shape):
        return np.empty(shape, flat.dtype)
    steps = [step * flat.itemsize for step in stride]
    view: npt.NDArray[Any] = as_strided(flat[offset:], shape, steps, writeable=flat.flags.writeable)
    return view


def bounds(indices: npt.NDArray[Any], low: int, high: int) -> tuple[int, int]:
    first, last = np.searchsorted(indices, [low, high]).tolist()
    return first, last


def address(bits: npt.NDArray[Any]) -> int:
    return int(bits.ctypes.data)
