"""Counts of the device path without a card, and what the floors of one make of them: a calculation.

Launches do on the host only what the counts need; tensors, batches, copies and Python code are as
on a device. Sizes are divided; the numbers of tensors and batches are real.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deltachain.kernels import device_diff, fused_diff, host, staging, torch_kernels
from deltachain.kernels.device_diff import BLOCK, CopyStream
from deltachain.publish import PublishConfig, Publisher, snapshot
from deltachain.publish.model.source import collect_weights
from deltachain.publish.quantise import tensors
from deltachain.publish.quantise.settings import RECIPES
from deltachain.publish.quantise.tensors import quantise
from deltachain.publish.ranks.collectives import Ranks
from deltachain.subscribe import SubscribeConfig, Subscriber
from deltachain.subscribe.targets.base import write_all
from tests.bench import report
from tests.bench.report import say
from tests.gpu.diff import DENSE_8B, MOE_18K, ModelShape
from tests.gpu.update import Scene

Counts: TypeAlias = dict[str, float]
DENSITY: Final = 0.005
PCIE: Final = 55e9
MEMORY: Final = 2.945e12
LAUNCH_S: Final = 25e-6
"""Bytes a second to the device, bytes a second of a copy on it, both sides counted, of one H100;
seconds of Python and driver for a launch of Triton."""
CORES: Final = 16
DISK: Final = 2.4e9
STAGE_NS: Final = 0.59
SWAP_NS: Final = 0.4
"""Cores and disk, in bytes a second, of that machine; its kernels' ns a change to stage and to swap
(0.006 to 0.011 s of 20 M)."""
ENCODE_NS: Final = 13.0
WIRE_NBYTES: Final = 1.4
DEFLATE: Final = 0.66e9
INFLATE: Final = 0.9e9
ANCHOR: Final = 0.67
"""Of one core here: ns and bytes on the wire of a change (`codec`), dense bytes a second of an
attach and of a newcomer, and an anchor's share of dense bytes (`anchor`)."""


def _qwen3(name: str, hidden: int, inner: int, embeddings: int) -> ModelShape:
    attention = (4096 * hidden, 1024 * hidden, 1024 * hidden, hidden * 4096, 128, 128)
    layer = (*attention, *(inner * hidden,) * 3, hidden, hidden)
    return ModelShape(name, (*(151936 * hidden,) * embeddings, *36 * layer, hidden))


SHAPES: Final = {
    "4.02 B": (_qwen3("Qwen3 4B", 2560, 9728, 1), 512),
    "8.19 B": (_qwen3("Qwen3 8B", 4096, 12288, 2), 1024),
    "18,721 tensors": (MOE_18K, 4096),
}


@dataclass
class Device:
    """What would run on a device: launches by program, distinct programs, and time to leave out."""

    launches: Counter[str] = field(default_factory=Counter)
    variants: set[tuple[Any, ...]] = field(default_factory=set)
    seconds: float = 0.0

    def launch(self, program: Any, _: int, *args: Any, **constants: Any) -> None:
        start = time.thread_time()
        name = program.fn.__name__
        self.launches[name] += 1
        kinds = (one.dtype if isinstance(one, Tensor) else type(one) for one in args)
        self.variants.add((name, *kinds, *sorted((k, str(v)) for k, v in constants.items())))
        found: Callable[..., None] | None = getattr(self, name, None)
        if found is not None:
            found(*args)
        self.seconds += time.thread_time() - start

    def count_kernel(self, table: Tensor, _: int, counts: Tensor) -> None:
        counts.copy_((table[2] * DENSITY).to(torch.int16))

    def place_kernel(
        self, counts: Tensor, _: int, before: Tensor, after: Tensor, *rest: Any
    ) -> None:
        starts, _ = rest
        begin, ends = before[2], counts.to(torch.int64).cumsum(0)
        starts.copy_(begin + ends - counts)
        after.copy_(torch.stack([begin, ends[-1], begin + ends[-1]]))

    def write_kernel(
        self, table: Tensor, _: int, counts: Tensor, starts: Tensor, *rest: Any
    ) -> None:
        offsets, new, old = rest
        count = counts.to(torch.int64)
        nth = torch.arange(int(count.sum())) - (count.cumsum(0) - count).repeat_interleave(count)
        found = nth * (table[2] // count.clamp(min=1)).repeat_interleave(count)
        here = slice(int(starts[0]), int(starts[0]) + nth.numel())
        offsets[here] = found.to(torch.int16)
        new[here] = 1
        if old is not new:
            old[here] = 0

    def digest_blocks(self, head: Tensor, bits: Tensor, _: Tensor) -> None:
        start = int(head[5])
        key = int(head[2]) % (1 << 64), int(head[3]) % (1 << 64)
        whole = bits.numpy().view(f"<u{bits.element_size()}")
        found = host.digest(key, whole, start)
        head[:2] = torch.from_numpy(np.array([found.lane0, found.lane1], np.uint64).view(np.int64))

    def decode_segment(self, *args: Any) -> None:
        args[4].zero_()

    def count_block(self, blocks: Tensor, *args: Any) -> None:
        args[3].copy_(blocks[:, 2])


@contextmanager
def device(shape: ModelShape, divisor: int) -> Iterator[Device]:
    """Treat weights on the host as weights on a device, in as many batches as at full size."""
    made = Device()

    def launch(program: Any, grid: int, *args: Any, **constants: Any) -> None:
        made.launch(program, grid, *args, **constants)

    full = sum(-(-n // BLOCK) for n in shape.numels) * 2 * BLOCK / device_diff.BATCH_NBYTES
    here = sum(-(-n // BLOCK) for n in shape.scaled(divisor).numels) * 2 * BLOCK
    with ExitStack() as stack:
        for target, name, fake in (
            (fused_diff, "_launch", launch),
            (staging, "launch", made.launch),
            (staging, "decodes_on", lambda _: True),
            (snapshot, "compares_on", lambda *_: True),
            (device_diff, "BATCH_NBYTES", max(2 * BLOCK, int(here / full))),
        ):
            stack.enter_context(patch.object(target, name, fake))
        yield made


def model_of(shape: ModelShape) -> nn.Module:
    made = nn.Module()
    for number, numel in enumerate(shape.numels):
        bits = torch.zeros(numel, dtype=torch.bfloat16)
        made.register_parameter(f"w{number}", nn.Parameter(bits))
    return made


def publishing(shape: ModelShape, divisor: int, *, resident: bool) -> Counts:
    """Counts of one publish, and of the attach before it."""
    small = shape.scaled(divisor)
    copies, waits = list[int](), list[Any]()
    original, wait = CopyStream.send_into, CopyStream.wait

    def send_into(self: CopyStream, room: Tensor, bits: Tensor) -> None:
        start = time.thread_time()
        copies.append(bits.nbytes)
        original(self, room, bits)
        card.seconds += time.thread_time() - start

    def waited(self: CopyStream, event: Any) -> None:
        waits.append(event)
        wait(self, event)

    with (
        tempfile.TemporaryDirectory() as url,
        device(shape, divisor) as card,
        patch.object(CopyStream, "send_into", send_into),
        patch.object(CopyStream, "wait", waited),
    ):
        config = PublishConfig(url=url, dtype="BF16", snapshot="device" if resident else "host")
        with Publisher(config).attach(model_of(small)) as publisher:
            publisher.flush()
            attached = card.launches.total()
            publisher.publish(step=1).result()
            before, python, after = Counter(card.launches), [], []
            for step in (2, 3, 4):
                copies.clear()
                waits.clear()
                card.seconds, start = 0.0, time.thread_time()
                future = publisher.publish(step=step)
                python.append(time.thread_time() - start - card.seconds)
                start = time.process_time()
                future.result()
                after.append(time.process_time() - start)
        launches = (card.launches - before).total() / 3
    nnz = DENSITY * shape.numel
    crossing = 0 if resident else 2 * shape.numel
    read = 3 if resident else 0
    return {
        "launches at attach": attached,
        "programs": len(card.variants),
        "launches": launches,
        "copies": len(copies),
        "waits": len(waits),
        "Python ms": 1e3 * min(python),
        "Python after ms": 1e3 * min(after),
        "blocks s": max(crossing / PCIE, 8 * shape.numel / MEMORY)
        + launches * LAUNCH_S * resident
        + min(python)
        + (4 + 2 * (read > 0)) * nnz / PCIE,
        "floor s": 2 * shape.numel / PCIE if not resident else 4 * shape.numel / MEMORY,
    }


def staging_of(shape: ModelShape, divisor: int) -> Counts:
    """Counts of one stage and swap in a rank."""
    with device(shape, divisor) as card:
        scene = Scene(shape.scaled(divisor), "cpu")
        crossed, seconds, swaps = 0, [], []
        upload = staging.upload

        def counted(batch: Any, where: torch.device) -> Tensor:
            nonlocal crossed
            crossed += batch.buffer.nbytes
            return upload(batch, where)

        with patch.object(staging, "upload", counted), report.one_core():
            for _ in range(4):
                crossed, before = 0, card.launches.total()
                card.seconds, start = 0.0, time.process_time()
                staged = scene.stage()
                seconds.append(time.process_time() - start - card.seconds)
                launches, before = card.launches.total() - before, card.launches.total()
                card.seconds, start = 0.0, time.process_time()
                write_all(staged.writes(scene.shares.__getitem__), 1)
                swaps.append(time.process_time() - start - card.seconds)
    return {
        "programs": len(card.variants),
        "launches": launches,
        "launches of a swap": card.launches.total() - before,
        "host ms": 1e3 * min(seconds),
        "swap host ms": 1e3 * min(swaps),
        "us a tensor": 1e6 * min(seconds) / len(shape.numels),
        "bytes a change": crossed / scene.nnz,
    }


class Operations(TorchDispatchMode):
    """Operations of torch that move bytes, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = self.nbytes = 0

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        given, results = tree_leaves((args, kwargs)), tree_leaves(made)
        found = {id(one): one for one in (*given, *results) if isinstance(one, Tensor)}
        if not function.is_view and "empty" not in function.name():
            self.count += 1
            self.nbytes += sum(one.nbytes for one in found.values())
        return made


def joining(shape: ModelShape, divisor: int) -> dict[str, Counts]:
    """Counts of an attach with its first anchor, and of a module that joins from nothing."""
    small, crossed, receive = shape.scaled(divisor), [0], torch_kernels.receive
    nbytes = 2 * small.numel

    def counted(array: Any, live: Tensor) -> Tensor:
        crossed[0] += 0 if isinstance(array, Tensor) else array.nbytes
        return receive(array, live)

    def since(work: Callable[[], Any]) -> tuple[Counts, Any]:
        crossed[0], card.seconds = 0, 0.0
        launches, start = card.launches.total(), time.process_time()
        with Operations() as operations:
            made = work()
        return {
            "launches": card.launches.total() - launches,
            "operations": operations.count,
            "crossed": crossed[0] / nbytes,
            "moved": operations.nbytes / nbytes,
            "Python ms": 1e3 * (time.process_time() - start - card.seconds),
        }, made

    with tempfile.TemporaryDirectory() as url, device(shape, divisor) as card:
        config = PublishConfig(url=url, dtype="BF16", snapshot="host")
        attach, publisher = since(lambda: Publisher(config).attach(model_of(small)))
        with publisher:
            publisher.flush()
        room = SubscribeConfig(url=url, stage_budget=(4 << 30) // divisor)  # the default
        replica = {name: one + 1 for name, one in model_of(small).named_parameters()}
        with (
            patch.object(torch_kernels, "on_host", lambda _: False),
            patch.object(torch_kernels, "receive", counted),
            Subscriber(room, replica) as subscriber,
        ):
            stage, staged = since(subscriber.stage)
            swap, _ = since(lambda: subscriber.swap(staged))
    return {"attach": attach, "newcomer": stage, "its pause": swap}


def quantising(recipe: str) -> Counts:
    """Counts of the codes of one matrix, 4096 x 4096 in bf16, by operations of torch."""
    chosen = RECIPES.chosen(recipe)
    model = nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16)
    made = quantise(collect_weights(model, dtype="BF16"), {"weight"}, chosen, Ranks.alone())
    made.agree("bench")
    with patch.object(tensors, "has_kernel", lambda _: False), Operations() as operations:
        dict(made.live())
    return {"operations": operations.count, "bytes an element": operations.nbytes / 4096**2}


def compiling() -> Counts:
    """Seconds to compile the programs of a bf16 model for sm_90, cold and from Triton's cache."""
    with tempfile.TemporaryDirectory() as folder:
        said = {}
        for name in ("cold s", "warm s"):
            done = subprocess.run(
                [sys.executable, "-m", "tests.contract.compiled", "few"],
                env={**os.environ, "TRITON_CACHE_DIR": folder, "TRITON_INTERPRET": "0"},
                cwd=Path(__file__).resolve().parents[2],
                capture_output=True,
                text=True,
                check=True,
            )
            said[name] = float(done.stdout.split()[-1])
    return said


def version(
    shape: ModelShape, publish: Counts, stage: Counts, join: Mapping[str, Counts]
) -> Counts:
    """Seconds of a version, an attach and a newcomer, if work divides among the cores."""
    dense, nnz = 2 * shape.numel, DENSITY * shape.numel
    found = {
        "blocks": publish["blocks s"],
        "encode": publish["Python after ms"] / 1e3 + 1e-9 * ENCODE_NS * nnz / CORES,
        "fetch": nnz * WIRE_NBYTES / DISK,
        "stage": stage["host ms"] / 1e3
        + nnz * (1e-9 * STAGE_NS + WIRE_NBYTES / PCIE)
        + stage["launches"] * LAUNCH_S,
        "swap": 1e-9 * SWAP_NS * nnz + LAUNCH_S,
    }
    busy = {n: one["launches"] * LAUNCH_S + one["Python ms"] / 1e3 for n, one in join.items()}
    disk, pause = ANCHOR * dense / DISK, join["its pause"]
    again = pause["crossed"] * (1 / CORES / INFLATE + 1 / PCIE)
    return {
        **found,
        "step to served": sum(found.values()),
        "attach": max(disk, dense / CORES / DEFLATE) + busy["attach"],
        "newcomer": max(disk, dense / CORES / INFLATE) + busy["newcomer"],
        "its pause": dense * (again + pause["moved"] / MEMORY) + busy["its pause"],
        "floor of both": max(disk, dense / PCIE),
    }


def run() -> Mapping[str, Any]:
    found: dict[str, Any] = {"benchmark": "counts", "publish": {}, "stage": {}}
    for name, (shape, divisor) in SHAPES.items():
        for resident in (False, True):
            place = "device" if resident else "host"
            row = publishing(shape, divisor, resident=resident)
            say(f"{name}, snapshot on the {place}: {row}")
            found["publish"][f"{name}, {place}"] = row
    shapes = {"291 tensors": (DENSE_8B, 1024), **SHAPES}
    for name, (shape, divisor) in shapes.items():
        found["stage"][name] = staging_of(shape, divisor)
        say(f"stage {name}: {found['stage'][name]}")
    joining(MOE_18K, 1 << 20)  # compiles the host's kernels
    found |= {"join": {}, "seconds of a version": {}, "codes": {}}
    for name, (shape, divisor) in SHAPES.items():
        rows = joining(shape, divisor)
        found["join"] |= {f"{name}, {what}": row for what, row in rows.items()}
        for key in (f"{name}, host", f"{name}, device"):
            counts = found["publish"][key], found["stage"][name], rows
            found["seconds of a version"][key] = version(shape, *counts)
    for recipe in ("fp8-block", "int8-row"):
        found["codes"][recipe] = quantising(recipe)
    found["compile"] = compiling()
    return {**found, "machine": report.machine()}


CAVEAT: Final = "A calculation from counts: nothing of it ran on a card."


def main(*, json_output: bool) -> int:
    result = run()
    tables = []
    for title in ("publish", "stage", "join", "seconds of a version", "codes"):
        rows = result[title]
        columns = list(next(iter(rows.values())))
        table = report.grid(title, "", *columns)
        for name, row in rows.items():
            table.add_row(name, *(f"{row[column]:.4g}" for column in columns))
        tables.append(table)
    table = report.grid("compile", "", "s")
    for name, seconds in result["compile"].items():
        table.add_row(name, f"{seconds:.2f}")
    report.emit(result, [*tables, table], json_output=json_output, caveat=CAVEAT)
    return 0
