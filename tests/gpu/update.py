"""Benchmark of an update on a card: whole models staged and swapped as a rank does it."""

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from deltachain.codec import Change, Part, encode_part
from deltachain.delta import TensorDelta
from deltachain.kernels import staging
from deltachain.replica.batches import DeviceStager, GroupPlan
from deltachain.replica.placements import Placement
from deltachain.replica.staged import RankStaged, Share, stage
from deltachain.subscribe.targets.base import write_all
from deltachain.threads import cores
from deltachain.types import StateDigest, TensorSpec
from tests.gpu.diff import DENSE_8B, DENSITY, MOE_18K, REPEATS, ModelShape, fitting, synchronize

BUDGET = 1 << 50
PART_NUMEL = 1 << 31
"""Elements of the tensors of one part; its directory stays far below its limit."""


class Scene:
    """Live weights of a shape on a device, and the parts of their next version."""

    def __init__(self, shape: ModelShape, where: str) -> None:
        self.where = torch.device(where)
        self.live: dict[str, Tensor] = {}
        self.indices: dict[str, Tensor] = {}
        specs, changes = {}, []
        for number, numel in enumerate(shape.numels):
            name = f"model.{number}.weight"
            bits = torch.randint(-(1 << 15), 1 << 15, (numel,), dtype=torch.int16, device=where)
            at = (torch.rand(numel, device=where) < DENSITY).nonzero().view(-1)
            self.live[name], self.indices[name] = bits, at
            specs[name] = TensorSpec(name, "BF16", (numel,))
            steps = np.where(np.arange(at.numel()) % 2, 1, 0xFFFF).astype(np.uint16)
            delta = TensorDelta(spec=specs[name], indices=at.cpu().numpy(), values=steps)
            changes.append(Change(delta, StateDigest()))
        self.nnz = sum(at.numel() for at in self.indices.values())
        self.parts = [Part.from_bytes(encode_part(group).data) for group in _groups(changes)]
        self.places = {name: Placement(bits, 0, (1,)) for name, bits in self.live.items()}
        slot = ("0", 0)
        self.stager = DeviceStager({n: [(slot, p)] for n, p in self.places.items()}, specs)
        self.stager.warm_up()
        self.shares = {n: Share([(slot, p)], 0, specs[n].numel) for n, p in self.places.items()}

    def plans(self) -> Iterator[GroupPlan]:
        for part in self.parts:
            yield from self.stager.groups([(0, part)])[0]

    def stage(self) -> RankStaged:
        staged = stage(self.plans(), self.shares.__getitem__, BUDGET, cores())
        synchronize(self.where)
        return staged

    def floor(self) -> float:
        bits = {name: live[self.indices[name]] for name, live in self.live.items()}
        synchronize(self.where)
        start = time.perf_counter()
        for name, live in self.live.items():
            live.index_copy_(0, self.indices[name], bits[name])
        synchronize(self.where)
        return time.perf_counter() - start


def bench_update(
    where: str,
    divisor: int | None = None,
    shapes: Sequence[ModelShape] = (DENSE_8B, MOE_18K),
) -> Iterator[tuple[str, Any]]:
    for shape in shapes:
        used = divisor or 2 * fitting(shape, where, resident=True)
        scene = Scene(shape.scaled(used), where)
        yield shape.name, {"sizes_divided_by": used, **_times(scene)}
        del scene
        if torch.device(where).type == "cuda":
            torch.cuda.empty_cache()


def _times(scene: Scene) -> dict[str, float]:
    name = max(scene.live, key=lambda one: scene.live[one].numel())
    before = scene.live[name].clone()
    stages, swaps, undoes, crossed = [], [], [], 0
    upload = staging.upload

    def counted(batch: Any, device: torch.device) -> Tensor:
        nonlocal crossed
        crossed += batch.buffer.nbytes
        return upload(batch, device)

    with mock.patch.object(staging, "upload", counted):
        for _ in range(REPEATS + 1):
            crossed, start = 0, time.perf_counter()
            staged = scene.stage()
            stages.append(time.perf_counter() - start)
            swaps.append(_seconds(scene, staged.writes(scene.shares.__getitem__)))
            assert int((scene.live[name] != before).sum()) == scene.indices[name].numel()
            undoes.append(_seconds(scene, staged.undoes()))
            assert torch.equal(scene.live[name], before)
    floor = statistics.median(scene.floor() for _ in range(REPEATS))
    swap = statistics.median(swaps[1:])
    return {
        "tensors": len(scene.live),
        "changes": scene.nnz,
        "threads": cores(),
        "stage_seconds": statistics.median(stages[1:]),
        "swap_seconds": swap,
        "undo_seconds": statistics.median(undoes[1:]),
        "index_copy_seconds": floor,
        "index_copy_over_swap": floor / swap,
        "bytes_to_device_per_change": crossed / scene.nnz,
    }


def _seconds(scene: Scene, writes: Iterator[Any]) -> float:
    synchronize(scene.where)
    start = time.perf_counter()
    write_all(writes, 1)
    synchronize(scene.where)
    return time.perf_counter() - start


def _groups(changes: list[Change]) -> Iterator[list[Change]]:
    group: list[Change] = []
    numel = 0
    for change in changes:
        if group and numel + change.delta.spec.numel > PART_NUMEL:
            yield group
            group, numel = [], 0
        group.append(change)
        numel += change.delta.spec.numel
    yield group
