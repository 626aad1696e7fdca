"""The kernels of this host: numba's where it is installed, numpy's where not.

Both are held to ``reference`` bit for bit by the same contract test; ``NAME`` says which ran, for
receipts. They are imported when the first one is asked for: numba takes a while, and vLLM 0.32
cannot start an engine in a process that has imported it (its scan for Triton kernels takes
llvmlite's library object for one). The functions below need numpy alone; together they are the
:class:`.protocol.BitKernels` of the host.
"""

from __future__ import annotations

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
    from deltachain.kernels.twolevel import *  # noqa: F403 - the same names, whichever is chosen


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name != "NAME" and not (name.islower() and callable(getattr(reference, name, None))):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # The reference names the kernels: there is no other list of them.
    chosen = "jit" if find_spec("numba") is not None else "twolevel"
    kernel = getattr(import_module(f"deltachain.kernels.{chosen}"), name)
    globals()[name] = kernel
    return kernel


def overwrite_(weights: npt.NDArray[Any], bits: npt.NDArray[Any]) -> None:
    """Write all bits, in any shape and strides."""
    weights[...] = bits


def copy(bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same bits in new memory."""
    return bits.copy()


def equal(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    """Whether two arrays hold the same bits."""
    return bool((one == other).all())


def receive(array: Any, live: npt.NDArray[Any]) -> npt.NDArray[Any]:  # noqa: ANN401 - see BitKernels
    """An array on the host, unsigned where it came as the signed bits of a tensor."""
    if isinstance(array, np.ndarray):
        return array
    bits: npt.NDArray[Any] = array.cpu().numpy()
    return bits.view(live.dtype) if bits.itemsize == live.itemsize else bits


def flat(bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Bits of any shape as a contiguous array of one dimension."""
    return np.ascontiguousarray(bits).reshape(-1)


def strided(
    flat: npt.NDArray[Any], offset: int, shape: Sequence[int], stride: Sequence[int]
) -> npt.NDArray[Any]:
    """A view in another shape; offset and strides count elements."""
    if not prod(shape):
        return np.empty(shape, flat.dtype)
    steps = [step * flat.itemsize for step in stride]
    view: npt.NDArray[Any] = as_strided(flat[offset:], shape, steps, writeable=flat.flags.writeable)
    return view


def bounds(indices: npt.NDArray[Any], low: int, high: int) -> tuple[int, int]:
    """The range of increasing indices that lie in ``[low, high)``."""
    first, last = np.searchsorted(indices, [low, high]).tolist()
    return first, last


def address(bits: npt.NDArray[Any]) -> int:
    """Address of the first element."""
    return int(bits.ctypes.data)
