"""What the device kernels cost beside their floors, on one card, in one run.

Every figure is the median of several timed repetitions after one that is not; ratios are floors
divided by ours, so 1.0 is as good as the floor.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltachain.delta import STEP, new_bits
from deltachain.kernels import device, host, staging
from deltachain.kernels.segments import StreamLayout
from deltachain.kernels.tile_batch import TensorTiles, pack_tiles
from deltachain.kernels.tiles import NEVER, TileGrid
from tests.contract.segments import Given, batch_of

NUMEL = 1 << 28
DENSITY = 0.01
DECODED = 1 << 26
TILED = 1 << 22
REPEATS = 7
KEY = (0x0123456789ABCDEF, 0xFEDCBA9876543210)


def bench(where: str, numel: int = NUMEL) -> dict[str, Any]:
    torch.manual_seed(0)
    current = torch.randint(-(1 << 15), 1 << 15, (numel,), dtype=torch.int16, device=where)
    changed = (torch.rand(numel, device=where) < DENSITY).nonzero().view(-1)
    snapshot = current.clone()
    snapshot[changed] += 1
    found = device.diff(snapshot, current)
    figures = {"numel": numel, "nnz": changed.numel(), "density": changed.numel() / numel}
    return (
        figures
        | _detect(snapshot, current)
        | _apply(snapshot, found)
        | _decode(found)
        | _tiles(snapshot, found)
    )


def _detect(snapshot: Tensor, current: Tensor) -> dict[str, float]:
    numel = snapshot.numel()
    floor_s = _seconds(lambda: torch.equal(snapshot, current), snapshot)
    diff_s = _seconds(lambda: device.diff(snapshot, current), snapshot)
    digest_s = _seconds(lambda: device.digest(KEY, current), snapshot)
    return {
        "diff_gbps": 2 * numel / diff_s / 1e9,
        "diff_over_read_both": floor_s / diff_s,
        "digest_gbps": 2 * numel / digest_s / 1e9,
    }


def _apply(weights: Tensor, found: device.DeviceChanges) -> dict[str, float]:
    live, nnz = weights.clone(), found.indices.numel()
    steps = found.new - found.old

    def stage() -> None:
        old = device.gather(live, found.indices)
        new = new_bits(old, steps, STEP)
        device.digest_at(KEY, found.indices, new)
        device.digest_at(KEY, found.indices, old)

    bare_s = _seconds(lambda: live.index_copy_(0, found.indices, found.new), live)
    swap_s = _seconds(lambda: device.scatter_(live, found.indices, found.new), live)
    stage_s = _seconds(stage, live)
    return {
        "swap_ns_per_change": 1e9 * swap_s / nnz,
        "swap_over_index_copy": bare_s / swap_s,
        "stage_ns_per_change": 1e9 * stage_s / nnz,
    }


def _decode(found: device.DeviceChanges) -> dict[str, float]:
    near = found.indices < DECODED
    indices = found.indices[near].cpu().numpy()
    steps = (found.new - found.old)[near].cpu().numpy().view(np.uint16)
    given = Given(0, DECODED, indices, steps)
    batch = batch_of([given], StreamLayout(2, 1, absolute=False))
    buffer = staging.upload(batch, found.indices.device)
    seconds = _seconds(lambda: staging.decode(batch, buffer), buffer)
    return {"decode_ns_per_change": 1e9 * seconds / max(indices.size, 1)}


def _tiles(snapshot: Tensor, found: device.DeviceChanges) -> dict[str, float]:
    size, columns, tensors = TILED, 2048, 16
    near = found.indices < size
    indices = found.indices[near].cpu().numpy()
    steps = (found.new - found.old)[near].cpu().numpy().view(np.uint16)
    old = snapshot[:size].clone()
    bits = old.cpu().numpy().view(np.uint16)
    grid = TileGrid(columns, 8, 7, 255)
    table = np.full(512, NEVER, np.uint8)
    table[:256] = 6
    half = size // 2
    windows = np.array([(0, half), (half, size - half)])
    coded = host.encode_tiles(windows, indices, steps, bits, table, grid)
    counts = np.diff(np.searchsorted(indices, [0, half, size]))
    nothing = np.zeros(2, np.int64)
    columns_of = (*windows.T, counts, coded.nbytes, nothing, nothing)
    segments = np.stack(columns_of, axis=1).astype(np.int64)
    batch = pack_tiles(
        [TensorTiles(n, segments, coded.data, table, grid, size, None, 2) for n in range(tensors)]
    )
    buffer, olds = staging.upload(batch, old.device), [old.clone() for _ in range(tensors)]
    seconds = _seconds(lambda: staging.decode_tiles(batch, buffer, olds), buffer)
    floor_s = _seconds(lambda: [one.amax() for one in olds], buffer)
    return {
        "tiles_ns_per_change": 1e9 * seconds / max(tensors * indices.size, 1),
        "tiles_over_read_old": floor_s / seconds,
    }


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
