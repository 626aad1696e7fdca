"""Bits of live weights in their wire dtypes, and their comparison with a snapshot."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from deltachain.kernels import device, host
from deltachain.kernels.device_diff import Compared
from deltachain.kernels.reference import Changes
from deltachain.publish.model.refusals import refuse_tensor
from deltachain.publish.model.source import Weight
from deltachain.publish.snapshot_memory import Kept
from deltachain.torch_names import TORCH_DTYPES
from deltachain.types import Bits

PIECE: Final = 1 << 19
"""Elements of a frozen weight copied by one operation: less than a millisecond."""


def host_diff_(weight: Weight, snapshot: Bits) -> Changes:
    """Find what changed in a weight on the host since a snapshot, and copy it there."""
    if weight.pending is not None:
        return weight.pending.diff_(snapshot)
    tensor, wanted = weight.tensor.detach(), TORCH_DTYPES[weight.spec.dtype]
    if tensor.dtype == torch.float32 and wanted == torch.bfloat16:
        return host.cast_diff_(snapshot, device.host_array(tensor.view(-1), np.float32))
    return host.diff_(snapshot, wire_bits(weight))


def compared(weight: Weight, kept: Kept) -> Compared:
    """Return a weight for the diff on a device."""
    if weight.pending is not None:
        return weight.pending.compared(weight.spec.name, kept)
    tensor, wanted = weight.tensor.detach().view(-1), TORCH_DTYPES[weight.spec.dtype]
    return Compared(weight.spec.name, kept.slab, kept.at, tensor, wanted, kept.resident)


def moved(weight: Weight, where: torch.device) -> Weight:
    """Return a copy of a weight on a device."""
    if weight.pending is not None:
        return replace(weight, pending=weight.pending.to(where))
    return replace(weight, tensor=weight.tensor.detach().to(where))


def copied(weight: Weight) -> Weight:
    """Return a copy of a frozen weight, for any thread while the trainer goes on.

    On the host a piece at a time, each by a single operation of the interpreter, after a look at
    the storage: its owner may free it or move it.

    Raises:
        ConfigError: Its memory was freed or resized.
    """
    live = weight.tensor
    refuse_tensor(weight.spec.name, live)
    if not device.on_host(live):
        return replace(weight, tensor=live.clone())
    made = torch.empty_like(live)
    target = unsigned(device.bits_of(made)).data
    for at in range(0, live.numel(), PIECE):
        refuse_tensor(weight.spec.name, live)
        source = unsigned(device.bits_of(live)).data
        target[at : at + PIECE] = source[at : at + PIECE]
    return replace(weight, tensor=made)


def wire_bits(weight: Weight) -> Bits:
    """Return flat bits of a live weight in its wire dtype; shares memory if no cast is needed."""
    if weight.pending is not None:
        return unsigned(device.bits_of(weight.pending.make()).cpu())
    tensor, wanted = weight.tensor.detach(), TORCH_DTYPES[weight.spec.dtype]
    if tensor.dtype == torch.float32 and wanted == torch.bfloat16 and not tensor.is_cuda:
        return host.cast_bf16(device.host_array(tensor.view(-1), np.float32))
    return unsigned(device_bits(weight).cpu())


def device_bits(weight: Weight) -> Tensor:
    """Return flat bits of a live weight in its wire dtype, where it is."""
    if weight.pending is not None:
        return device.bits_of(weight.pending.make())
    tensor, wanted = weight.tensor.detach(), TORCH_DTYPES[weight.spec.dtype]
    if tensor.dtype == torch.float32 and wanted == torch.bfloat16:
        return device.cast_bf16(device.bits_of(tensor))
    return device.bits_of(tensor.to(wanted))


def signed(bits: Bits) -> Tensor:
    """Return the integer tensor of unsigned numpy bits; shares memory."""
    return torch.from_numpy(bits if bits.itemsize == 1 else bits.view(f"<i{bits.itemsize}"))


def unsigned(bits: Tensor) -> Bits:
    """Return the unsigned numpy view of integer bits on the host."""
    return device.host_array(bits, f"<u{bits.element_size()}")
