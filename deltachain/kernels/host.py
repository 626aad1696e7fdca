"""Kernels on the host: those of :mod:`.numba_kernels`, and some that need numpy only.

The former are imported on first use: numba is slow to import, and vLLM 0.32 cannot start an engine
in a process that has imported it (its scan for Triton kernels mistakes llvmlite's library object
for one). Together they are the :class:`.protocol.BitKernels` of the host, which says what they do.
"""

from collections.abc import Sequence
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

if TYPE_CHECKING:
    from deltachain.kernels.numba_kernels import *  # noqa: F403


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name.startswith("_"):  # questions about modules import nothing
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    kernel = getattr(import_module("deltachain.kernels.numba_kernels"), name)
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
