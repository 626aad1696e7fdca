"""What the device kernels cost beside their floors, on one card, in one run.

Every figure is the median of several timed repetitions after one that is not; ratios are floors
divided by ours, so 1.0 is as good as the floor.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deltachain.delta import STEP, new_bits
from deltachain.kernels import staging, torch_kernels
from deltachain.kernels.segments import StreamLayout
from tests.contract.batches import Given, batch_of

NUMEL = 1 << 28
DENSITY = 0.01
DECODED = 1 << 26
"""Elements of the tensor whose changes are decoded."""
REPEATS = 7
KEY = (0x0123456789ABCDEF, 0xFEDCBA9876543210)


class Found(NamedTuple):
    """Changed elements as three ``(nnz,)`` tensors: indices, old and new bits."""

    indices: Tensor
    old: Tensor
    new: Tensor


def bench(where: str, numel: int = NUMEL) -> dict[str, Any]:
    torch.manual_seed(0)
    current = torch.randint(-(1 << 15), 1 << 15, (numel,), dtype=torch.int16, device=where)
    changed = (torch.rand(numel, device=where) < DENSITY).nonzero().view(-1)
    snapshot = current.clone()
    snapshot[changed] += 1
    found = Found(changed, snapshot[changed], current[changed])
    figures = {"numel": numel, "nnz": changed.numel(), "density": changed.numel() / numel}
    return figures | _detect(snapshot, current) | _apply(snapshot, found) | _decode(found)


def _detect(snapshot: Tensor, current: Tensor) -> dict[str, float]:
    """The digest; the diff of whole models is elsewhere."""
    numel = snapshot.numel()
    digest_s = _seconds(lambda: torch_kernels.digest(KEY, current), snapshot)
    return {
        "digest_gbps": 2 * numel / digest_s / 1e9,
    }


def _apply(weights: Tensor, found: Found) -> dict[str, float]:
    """Staging and swapping against one bare ``index_copy_``."""
    live, nnz = weights.clone(), found.indices.numel()
    steps = found.new - found.old

    def stage() -> None:
        old = torch_kernels.gather(live, found.indices)
        new = new_bits(old, steps, STEP)
        torch_kernels.digest_at(KEY, found.indices, new)
        torch_kernels.digest_at(KEY, found.indices, old)

    bare_s = _seconds(lambda: live.index_copy_(0, found.indices, found.new), live)
    swap_s = _seconds(lambda: torch_kernels.scatter_(live, found.indices, found.new), live)
    stage_s = _seconds(stage, live)
    return {
        "swap_ns_per_change": 1e9 * swap_s / nnz,
        "swap_over_index_copy": bare_s / swap_s,
        "stage_ns_per_change": 1e9 * stage_s / nnz,
    }


def _decode(found: Found) -> dict[str, float]:
    """Streams of up to 64 segments to indices and steps."""
    near = found.indices < DECODED
    indices = found.indices[near].cpu().numpy()
    steps = (found.new - found.old)[near].cpu().numpy().view(np.uint16)
    given = Given(0, DECODED, indices, steps)
    batch = batch_of([given], StreamLayout(2, 1, absolute=False))
    buffer = staging.upload(batch, found.indices.device)
    seconds = _seconds(lambda: staging.decode(batch, buffer), buffer)
    return {"decode_ns_per_change": 1e9 * seconds / max(indices.size, 1)}


def _seconds(work: Callable[[], object], like: Tensor) -> float:
    def once() -> float:
        if like.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if like.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once()
    return statistics.median(once() for _ in range(REPEATS))
