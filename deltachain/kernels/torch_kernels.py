"""Kernels in torch operations, for weights on an accelerator; digests by Triton, or on the host.

Bits are signed integer tensors of the element's width, which every torch device can compare, index
and add; ``bits_of`` returns such a view of any dtype. Sums wrap as on the host. Functions without a
docstring do what :class:`.protocol.BitKernels` says. Writes use ``index_copy_``, since
``scatter_`` costs as much as its whole destination.
"""

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltachain.kernels import host
from deltachain.kernels.protocol import LiveBits
from deltachain.types import BITS_DTYPES, Bits, StateDigest

logger = logging.getLogger(__name__)

_A = TypeVar("_A")
_T = TypeVar("_T")


PORTABLE: Final = 1  # flag of `cudaHostRegister`: pinned for every device


def pin_(tensor: Tensor) -> bool:
    """Pin the memory of a tensor on the host, for every device, until the tensor goes away.

    ``Tensor.pin_memory`` copies to memory of the next power of two, which a snapshot cannot afford.
    """
    if not tensor.nbytes:
        return True
    runtime, address = torch.cuda.cudart(), tensor.data_ptr()
    code = int(runtime.cudaHostRegister(address, tensor.nbytes, PORTABLE))
    if code != 0:
        logger.warning(
            "cannot pin %d bytes of host memory, CUDA error %d: they are copied more slowly",
            tensor.nbytes,
            code,
        )
        return False
    # Not at exit: the driver may be gone by then, and frees everything anyway.
    weakref.finalize(tensor, runtime.cudaHostUnregister, address).atexit = False
    return True


INT_DTYPES: Final[dict[int, torch.dtype]] = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}
"""Integer dtype of the bits, by element size in bytes."""


def bits_of(tensor: Tensor) -> Tensor:
    """Return a flat integer view of a contiguous tensor's bits; shares its memory."""
    return tensor.detach().view(-1).view(INT_DTYPES[tensor.element_size()])


class _HostMemory:
    """Memory of a tensor as numpy takes it: an array over it keeps this, and this the tensor."""

    def __init__(self, tensor: Tensor, kind: np.dtype[Any]) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "typestr": kind.str,
            "version": 3,
        }


def host_array(tensor: Tensor, kind: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return a contiguous tensor on the host as an array; shares its memory.

    ``Tensor.numpy`` would forbid ``resize_`` to the owner of the tensor, for good. The array must
    not outlive the call that asked for it: a storage that is resized leaves its memory.
    """
    if not tensor.numel():
        return np.empty(tuple(tensor.shape), kind)
    return np.asarray(_HostMemory(tensor, np.dtype(kind)))


def storage_bits(tensor: Tensor) -> Tensor:
    """Return a flat integer view of a tensor's whole storage; shares its memory."""
    width = tensor.element_size()
    numel = tensor.untyped_storage().nbytes() // width
    return torch.as_strided(tensor.detach(), (numel,), (1,), 0).view(INT_DTYPES[width])


def on_host(tensor: Tensor) -> bool:
    """Return whether a tensor is on the host, where numpy works on its bits."""
    return tensor.device.type == "cpu"


def on_streams_of_caller(
    function: Callable[[_A], _T], devices: Iterable[torch.device]
) -> Callable[[_A], _T]:
    """Return a function that runs in any thread on the current streams of this one.

    A thread begins on the default stream of each device, which does not wait for others.
    """
    streams = [torch.cuda.current_stream(one) for one in devices if one.type == "cuda"]

    def run(argument: _A) -> _T:
        with ExitStack() as stack:
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
            return function(argument)

    return run if streams else function


def live_bits(bits: Tensor) -> LiveBits:
    """Return bits for the kernels of their location: numpy on the host, torch on a device."""
    return bits.numpy().view(BITS_DTYPES[bits.element_size()]) if on_host(bits) else bits


def receive(array: LiveBits, live: Tensor) -> Tensor:
    """Move an array to the device of ``live``; unsigned bits become signed ones of equal width."""
    if isinstance(array, Tensor):
        return array.to(live.device)
    signed = np.ascontiguousarray(array)
    if array.dtype.kind == "u" and array.itemsize > 1:
        signed = signed.view(f"<i{array.itemsize}")
    return torch.from_numpy(np.require(signed, requirements="W")).to(live.device)


def overwrite_(weights: Tensor, bits: Tensor) -> None:
    weights.copy_(bits)


def copy(bits: Tensor) -> Tensor:
    return bits.clone()


def equal(one: Tensor, other: Tensor) -> bool:
    return one.equal(other)


def flat(bits: Tensor) -> Tensor:
    return bits.reshape(-1)


def strided(flat: Tensor, offset: int, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    return flat.as_strided(shape, stride, flat.storage_offset() + offset)


def bounds(indices: Tensor, low: int, high: int) -> tuple[int, int]:
    edges = torch.tensor([low, high], device=indices.device)
    first, last = torch.searchsorted(indices, edges).tolist()
    return first, last


def address(bits: Tensor) -> int:
    return bits.data_ptr()


def cast_bf16(master: Tensor) -> Tensor:
    """Cast fp32 bits, as int32, to bf16 bits: round to nearest even; a NaN becomes quiet."""
    # Torch's own cast gives every NaN the same bits, others on each device.
    high = master >> 16
    rounded = (master + 0x7FFF + (high & 1)) >> 16
    is_nan = (master & 0x7FFFFFFF) > 0x7F800000
    return torch.where(is_nan, high | 0x40, rounded).to(torch.int16)


def gather(weights: Tensor, indices: Tensor) -> Tensor:
    return weights.index_select(0, indices)


def scatter_(weights: Tensor, indices: Tensor, bits: Tensor) -> None:
    weights.index_copy_(0, indices, bits)


def digest_at(key: tuple[int, int], indices: Tensor, bits: Tensor) -> StateDigest:
    from deltachain.kernels import staging  # noqa: PLC0415 - which imports this module

    if staging.decodes_on(bits.device):
        return staging.digest(key, bits, indices=indices)
    return host.digest_at(key, indices.cpu().numpy(), _copied(bits))


def digest(key: tuple[int, int], bits: Tensor, start: int = 0) -> StateDigest:
    from deltachain.kernels import staging  # noqa: PLC0415 - which imports this module

    if staging.decodes_on(bits.device):
        return staging.digest(key, bits, start)
    return host.digest(key, _copied(bits), start)


def _copied(bits: Tensor) -> Bits:
    return bits.detach().contiguous().cpu().numpy().view(BITS_DTYPES[bits.element_size()])


def signed(value: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit integer."""
    return value - (1 << 64) if value >= 1 << 63 else value
