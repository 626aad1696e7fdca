"""The diff on a card: checks of streams in order, benchmarks of it and of kernels alone."""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from deltachain.kernels import staging, torch_kernels
from deltachain.kernels.arrays import Changes
from deltachain.kernels.device_diff import Compared, DeviceDiff, compares_on, disagreements
from deltachain.kernels.segments import StreamLayout
from deltachain.kernels.torch_kernels import pin_
from tests.contract.batches import Given, batch_of
from tests.contract.many_tensors import MANY_CHECKS, Weights, counted, settle

DENSITY = 0.01
REPEATS = 3
COPY_NBYTES = 64 << 20
NUMEL = 1 << 28
HOST_NBYTES = 17 << 30
"""Bytes of the largest snapshot on the host: to pin a GB takes a third of a second."""

KEY = (0x0123456789ABCDEF, 0xFEDCBA9876543210)


def diff_checks(where: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Every check of the diff by name."""
    for check in (*MANY_CHECKS, check_stream_order, check_proven):
        yield f"diff.{check.__name__}", partial(check, where)


def check_proven(where: str) -> None:
    """The product compares weights on this card, with kernels that equal the reference."""
    device = torch.device(where)
    assert disagreements(device) == []
    assert compares_on(device, torch.float32, torch.bfloat16) == (device.type == "cuda")


def check_stream_order(where: str) -> None:
    """Weights that a busy stream is still writing are compared as they will be, on any stream."""
    on_card = torch.device(where).type == "cuda"
    for resident, own_stream in product((False, True), (False, True)):
        stream = torch.cuda.Stream() if own_stream and on_card else None  # none: the current one
        with (
            patch("deltachain.kernels.device_diff.BATCH_NBYTES", 1 << 20),
            torch.cuda.stream(stream),
        ):
            sizes = (3_000_000, 5, 400_000) if on_card else (30_000, 5, 4_000)
            weights = Weights(where, sizes, resident=resident)
            diff = DeviceDiff(torch.device(where))
            right = weights.live.clone()
            for _ in range(3):
                weights.live.zero_()
                if on_card:
                    torch.cuda._sleep(100_000_000)  # tens of milliseconds, as a trainer's step
                weights.live.copy_(right)
                weights.add_to(diff)
                weights.check(settle(diff))
                weights.kept.copy_(weights.slab_before())


@dataclass(frozen=True, slots=True)
class ModelShape:
    name: str
    numels: tuple[int, ...]

    def scaled(self, divisor: int) -> "ModelShape":
        return ModelShape(self.name, tuple(max(1, n // divisor) for n in self.numels))

    @property
    def numel(self) -> int:
        return sum(self.numels)


def _layer(hidden: int, key: int, inner: int) -> tuple[int, ...]:
    attention = (hidden * hidden, key * hidden, key * hidden, hidden * hidden)
    return (*attention, inner * hidden, inner * hidden, hidden * inner, hidden, hidden)


DENSE_8B = ModelShape(
    "dense 8B", (128256 * 4096, *(32 * _layer(4096, 1024, 14336)), 4096, 128256 * 4096)
)
"""291 tensors, as Llama 3 8B has them."""

MOE_18K = ModelShape(
    "MoE 18,000 tensors",
    (151936 * 2048, *(48 * (4 * (2048 * 2048,) + 2 * (2048,) + 384 * (2048 * 768,)))),
)
"""18,721 tensors, 30 B elements, as a mixture of 128 experts in 48 layers has them."""


class Model:
    """Weights of a shape on a device, and their snapshot."""

    def __init__(self, shape: ModelShape, where: str, *, resident: bool) -> None:
        self._resident = resident
        starts = [0]
        for numel in shape.numels:
            starts.append(starts[-1] + -(-numel // 8) * 8)
        self._starts, self.numel = starts, shape.numel
        self.live = [
            torch.randint(-(1 << 15), 1 << 15, (n,), dtype=torch.int16, device=where)
            for n in shape.numels
        ]
        self._kept = torch.empty(starts[-1], dtype=torch.int16, device=where if resident else "cpu")
        if torch.device(where).type == "cuda" and not resident:
            pin_(self._kept)
        for at, live in zip(starts, self.live, strict=False):
            self._kept[at : at + live.numel()].copy_(live)
        largest = max(shape.numels)
        self._flips = (torch.rand(largest, device=where) < DENSITY).to(torch.int16)

    def change(self) -> int:
        changed = torch.zeros((), dtype=torch.int64, device=self._flips.device)
        for live in self.live:
            flips = self._flips[: live.numel()]
            live.bitwise_xor_(flips)
            changed += flips.sum()
        return int(changed)

    def tensors(self) -> Iterator[Compared]:
        for number, (at, live) in enumerate(zip(self._starts, self.live, strict=False)):
            yield Compared(str(number), self._kept, at, live, torch.int16, self._resident)


def bench_diff(where: str, divisor: int | None = None) -> Iterator[tuple[str, Any]]:
    """Yield seconds of a diff of whole models, beside the floors of the same run."""
    known = floors(where)
    yield "floors", known
    for shape, resident in product((DENSE_8B, MOE_18K), (False, True)):
        used = divisor or fitting(shape, where, resident=resident)
        model = Model(shape.scaled(used), where, resident=resident)
        place = "device" if resident else "host"
        figures = {
            "sizes_divided_by": used,
            "tensors": len(model.live),
            "numel": model.numel,
            **_times(model, where, known),
        }
        yield f"{shape.name}, snapshot on the {place}", figures
        del model
        if torch.device(where).type == "cuda":
            torch.cuda.empty_cache()


def fitting(shape: ModelShape, where: str, *, resident: bool) -> int:
    free = torch.cuda.mem_get_info(where)[0] if torch.device(where).type == "cuda" else 0
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    divisor = 1
    while divisor < 1 << 20:
        nbytes = 2 * shape.numel // divisor
        on_device = (2.5 if resident else 1.5) * nbytes
        on_host = nbytes <= HOST_NBYTES and 1.5 * nbytes < 0.7 * pages
        if on_device < 0.9 * free and (resident or on_host):
            break
        divisor *= 2
    return divisor


def _times(model: Model, where: str, known: dict[str, float]) -> dict[str, float]:
    diff = DeviceDiff(torch.device(where))
    for tensor in model.tensors():
        diff.expect(tensor.kind, tensor.current.numel())
    seconds, completions, waits, nbytes = list[float](), list[float](), 0, 0
    for number in range(REPEATS + 1):
        changed = model.change()
        found: dict[str, Changes] = {}
        before = diff.streams.to_host_nbytes
        with counted("wait") as waited:
            synchronize(where)
            start = time.perf_counter()
            for tensor in model.tensors():
                diff.add(tensor)
            enqueued = time.perf_counter() - start
            landing = diff.land()
            blocked = time.perf_counter() - start
            landing.complete(found)
            if number:  # the first takes memory and compiles
                seconds.append(blocked)
                completions.append(time.perf_counter() - start - blocked)
        assert sum(changes.indices.size for changes in found.values()) == changed
        waits, nbytes = len(waited), diff.streams.to_host_nbytes - before
    taken = statistics.median(seconds)
    resident = next(iter(model.tensors())).resident
    floor_s = 2 * model.numel / (1e9 * known["host_to_device_gbps"])
    if resident:  # both sides are read once
        floor_s = 4 * model.numel / (1e9 * known["device_copy_gbps"])
    return {
        "seconds": taken,
        "enqueue_seconds": enqueued,
        "complete_seconds": statistics.median(completions),
        "gbps": 2 * model.numel / taken / 1e9,
        "floor_over_ours": floor_s / taken,
        "changes": changed,
        "bytes_back_per_change": nbytes / max(1, changed),
        "copies_to_device": sum(lane.copies for lane in diff.lanes.values()) / (REPEATS + 1),
        "waits": waits,
    }


def floors(where: str) -> dict[str, float]:
    numel = COPY_NBYTES * (16 if torch.device(where).type == "cuda" else 1)
    one = torch.zeros(numel, dtype=torch.uint8, device=where)
    other = torch.ones_like(one)
    host = torch.zeros(numel, dtype=torch.uint8)
    if one.is_cuda:
        pin_(host)

    def in_copies(to: Tensor, source: Tensor) -> None:
        for at in range(0, numel, COPY_NBYTES):
            part = slice(at, at + COPY_NBYTES)
            to[part].copy_(source[part], non_blocking=True)

    return {
        "device_copy_gbps": 2 * numel / _median(lambda: one.copy_(other), where) / 1e9,
        "host_to_device_gbps": numel / _median(lambda: in_copies(one, host), where) / 1e9,
        "device_to_host_gbps": numel / _median(lambda: in_copies(host, one), where) / 1e9,
    }


def bench_kernels(where: str, numel: int = NUMEL) -> dict[str, float]:
    """A digest, and streams of up to 64 segments that become indices and steps."""
    torch.manual_seed(0)
    bits = torch.randint(-(1 << 15), 1 << 15, (numel,), dtype=torch.int16, device=where)
    indices = (torch.rand(numel // 4) < DENSITY).nonzero().view(-1).numpy()
    steps = np.full(indices.size, 0xFFFF, np.uint16)
    given = Given(0, numel // 4, indices, steps)
    batch = batch_of([given], StreamLayout(2, 1, absolute=False))
    buffer = staging.upload(batch, bits.device)
    digest_s = _median(lambda: torch_kernels.digest(KEY, bits), where)
    decode_s = _median(lambda: staging.decode(batch, buffer), where)
    return {
        "digest_gbps": 2 * numel / digest_s / 1e9,
        "decode_ns_per_change": 1e9 * decode_s / max(1, indices.size),
    }


def _median(work: Callable[[], object], where: str) -> float:
    times = []
    for _ in range(6):
        synchronize(where)
        start = time.perf_counter()
        work()
        synchronize(where)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def synchronize(where: str | torch.device) -> None:
    if torch.device(where).type == "cuda":
        torch.cuda.synchronize(where)
