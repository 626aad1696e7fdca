"""What kernels that decode tiles of many tensors promise: what the reference says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltachain.errors import BaseMismatchError
from deltachain.kernels import tiles
from deltachain.kernels.batched import upload
from deltachain.kernels.device import INT_DTYPES
from deltachain.kernels.segments import ChangeBatch, LivePlacement, PlacementTable
from deltachain.kernels.staging import StagingKernels, TileKernels
from deltachain.kernels.tile_batch import TensorTiles, TileBatch, TileReason, pack_tiles
from deltachain.kernels.tiles import BINS, NEVER, TileGrid, TileStreams
from deltachain.types import BITS_DTYPES, Bits

RULES = {1: (0, 255), 2: (7, 255), 4: (23, 255), 8: (55, 255)}
"""Shift and mask of bins by width: those of fp8 codes, BF16, F32 and F64."""

SHAPES_AND_DENSITIES = (
    ((6, 32, 1), 0.2),
    ((6, 32, 4), 0.5),
    ((2, 8, 8), 1.0),
    ((1, 1, 1), 1.0),
    ((40, 48, 3), 0.05),
)


@dataclass(frozen=True)
class TileArm:
    kernels: TileKernels
    staging: StagingKernels
    device: torch.device

    def decode(self, tensors: list[CodedTensor]) -> ChangeBatch:
        batch = pack_tiles([one.tiles for one in tensors])
        olds = [self.old(one) for one in tensors]
        return self.kernels.decode_tiles(batch, self.upload(batch), olds)

    def upload(self, batch: TileBatch) -> Tensor:
        return upload(batch, self.device)

    def old(self, one: CodedTensor) -> Tensor:
        there = one.old[one.tiles.grid.start : one.tiles.stop]
        signed = there.view(f"i{there.itemsize}" if there.itemsize > 1 else "u1")
        return torch.from_numpy(signed.copy()).to(self.device)


@dataclass(frozen=True)
class CodedTensor:
    tiles: TensorTiles
    old: Bits

    def expected(self) -> tuple[Any, Any] | str:
        one = self.tiles
        old = self.old[one.grid.start : one.stop]
        try:
            return tiles.decode_tiles(
                one.segments, TileStreams(one.data, old, one.table, one.grid, one.wanted)
            )
        except ValueError as exc:
            return str(exc)


def coded(
    rng: Any, number: int, width: int, shape: tuple[int, int, int], density: float, start: int = 0
) -> CodedTensor:
    rows, columns, cuts = shape
    dtype = BITS_DTYPES[width]
    shift, mask = RULES[width]
    bins = rng.choice(mask + 1, 5, replace=False).astype(np.uint64)
    numel = rows * columns
    noise = rng.integers(0, 1 << (8 * width), numel, np.uint64, endpoint=False)
    old = (
        (noise & ~np.uint64(mask << shift)) | (rng.choice(bins, numel) << np.uint64(shift))
    ).astype(dtype)
    first = start * columns
    indices = first + np.flatnonzero(rng.random(numel - first) < density)
    steps = _steps(rng, indices.size, dtype)
    grid = TileGrid(columns, cuts, shift, mask, first)
    table = np.full(2 * BINS, NEVER, np.uint8)
    for bin_ in np.unique(tiles.bins(old[indices], shift, mask)).tolist():
        table[bin_] = rng.integers(0, 5)
        table[BINS + bin_] = rng.integers(0, 10)
    ones = _bins_of_ones(old, indices, steps, (shift, mask))
    table[BINS + ones] = NEVER
    half = (start + rows + 1) // 2 * columns
    windows = np.array([w for w in ((first, half - first), (half, numel - half)) if w[1]], np.int64)
    counts = np.diff(np.searchsorted(indices, [*windows[:, 0], numel]))
    windows = windows[counts > 0]
    data = tiles.encode_tiles(windows, indices, steps, old[first:], table, grid)
    segments = np.zeros((len(windows), 6), np.int64)
    segments[:, :2], segments[:, 2], segments[:, 3] = windows, counts[counts > 0], data.nbytes
    found = TensorTiles(number, segments, data.data, table, grid, numel, None, width)
    return CodedTensor(found, old)


def _steps(rng: Any, count: int, dtype: Any) -> Bits:
    width = np.dtype(dtype).itemsize
    kinds = [np.ones(count, np.uint64), rng.integers(1, 40, count, np.uint64)]
    kinds.append(rng.integers(1, 1 << (8 * width), count, np.uint64))
    steps: Bits = np.choose(rng.integers(0, 3, count), kinds).astype(dtype)
    steps = np.where(rng.random(count) < 0.5, steps, (0 - steps).astype(dtype))
    return np.where(steps == 0, 1, steps).astype(dtype)


def _bins_of_ones(old: Bits, indices: Any, steps: Bits, rule: tuple[int, int]) -> Any:
    found = tiles.bins(old[indices], *rule)
    if found.size:
        steps[found == found[0]] = 1
    magnitude = np.minimum(steps, (0 - steps).astype(steps.dtype))
    return np.array([b for b in np.unique(found) if (magnitude[found == b] == 1).all()], np.int64)


def check_tiles(arm: TileArm) -> None:
    rng = np.random.default_rng(31)
    for width in BITS_DTYPES:
        given = [
            coded(rng, number, width, shape, density, start=shape[0] // 3 if number % 2 else 0)
            for number, (shape, density) in enumerate(SHAPES_AND_DENSITIES)
        ]
        given = [_sharded(rng, one) if number == 4 else one for number, one in enumerate(given)]
        for tensors in (given, given[1:2]):
            found = arm.decode(tensors)
            assert not found.verdicts[0][1].any()
            _check_elements(found, tensors, width)


def check_hostile_tiles(arm: TileArm) -> None:
    rng = np.random.default_rng(32)
    seen = set()
    for tensors in _hostile(rng):
        width = tensors[0].tiles.width
        found = arm.decode(tensors)
        verdict = found.verdicts[0][1].cpu().numpy()
        indices = found.indices.cpu().numpy()
        assert ((indices >= 0) & (indices < tensors[0].old.size)).all()
        expected = tensors[0].expected()
        assert isinstance(expected, str) == bool(verdict.any()), (expected, verdict)
        if isinstance(expected, str):
            seen.add(TileReason(int(verdict.max())))
            _check_refused(arm, found, width)
        else:
            _check_elements(found, tensors, width)
    assert seen == set(TileReason) - {TileReason.NONE}, seen


def check_other_bits(arm: TileArm) -> None:
    rng = np.random.default_rng(33)
    for width in (1, 2):
        one = coded(rng, 0, width, (16, 32, 4), 0.3)
        other = replace(one, old=np.roll(one.old, 3))
        found = arm.decode([other])
        assert isinstance(other.expected(), str)
        _check_refused(arm, found, width)


TileCheck = Callable[[TileArm], None]

TILE_CHECKS: tuple[TileCheck, ...] = (
    check_tiles,
    check_hostile_tiles,
    check_other_bits,
)


def _sharded(rng: Any, one: CodedTensor) -> CodedTensor:
    count, cuts = len(one.tiles.segments), one.tiles.grid.cuts
    wanted = rng.random((count, cuts)) < 0.5
    wanted[0, 0], wanted[-1, -1] = True, False
    return replace(one, tiles=replace(one.tiles, wanted=wanted))


def _hostile(rng: Any) -> Iterator[list[CodedTensor]]:
    for width in (1, 2, 8):
        for shape in ((6, 32, 4), (2, 16, 1)):
            one = coded(rng, 0, width, shape, 0.3)
            for _ in range(12):
                data = one.tiles.data.copy()
                data[rng.integers(data.size, size=rng.integers(1, 3))] = rng.choice(
                    [0, 1, 127, 255]
                )
                yield [replace(one, tiles=replace(one.tiles, data=data))]
            for fill in (0, 255):
                data = np.full_like(one.tiles.data, fill)
                yield [replace(one, tiles=replace(one.tiles, data=data))]


def _check_elements(found: ChangeBatch, tensors: list[CodedTensor], width: int) -> None:
    assert found.kept is not None
    assert found.values.dtype == INT_DTYPES[width]
    spans = {int(tensor): (first, count) for tensor, first, count, _ in found.spans.tolist()}
    for one in tensors:
        first, count = spans.get(one.tiles.tensor, (0, 0))
        there = slice(first, first + count)
        kept = found.kept[there].cpu().numpy()
        indices = found.indices[there].cpu().numpy()[kept]
        values = found.values[there].cpu().numpy()[kept].view(one.old.dtype)
        order = np.argsort(indices)
        expected = one.expected()
        assert not isinstance(expected, str)
        np.testing.assert_array_equal(indices[order], expected[0])
        np.testing.assert_array_equal(values[order], expected[1])


def _check_refused(arm: TileArm, found: ChangeBatch, width: int) -> None:
    live = torch.zeros(4096, dtype=INT_DTYPES[width], device=arm.device)
    place = LivePlacement(0, 0, [(4096, 1, 1)], live)
    table = PlacementTable.build([place], [(1, 2)], arm.device)
    message = ""
    try:
        arm.staging.stage(found, table, ["tensor 0"])
    except BaseMismatchError as exc:
        message = str(exc)
    assert "'tensor 0' does not hold the bits before the segment at" in message
    assert not live.any()
