"""Pinned memory of exact size on the host, from which a device copies by itself."""

from __future__ import annotations

import logging
import weakref

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def pin_(tensor: Tensor) -> bool:
    """Pin the memory of a tensor on the host until the tensor goes away.

    ``Tensor.pin_memory`` copies to memory of the next power of two, which a snapshot cannot afford.

    Returns:
        Whether it is pinned. Copies work in either case; without, they are slow and block.
    """
    if not tensor.nbytes:
        return True
    runtime, address = torch.cuda.cudart(), tensor.data_ptr()
    code = int(runtime.cudaHostRegister(address, tensor.nbytes, 0))
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
