"""``python -m tests.ranks.bench``: what publishing costs the ranks of a sharded trainer.

One model of fp32 masters under FSDP2, fused AdamW, gloo; one thread a rank. A rank waits for the
diff and for two words of the others; what it waits for them longer than they need is not counted as
publishing, as ranks are brought in step before each call.
"""

import argparse
import ctypes
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.model.layout import local_of
from tests.bench import report
from tests.ranks.spawn import run

LAYERS, WIDTH = 12, 1024
STEPS: Final = 8
RATE: Final = 3e-6


ROWS: Final = {
    "step_s": ("optimizer step, ms", 1e3),
    "seen_s": ("publish, as the loop sees it, ms", 1e3),
    "wire": ("shard in the wire dtype, MB", 1e-6),
    "peak": ("at most while publishing, MB", 1e-6),
}


def measure(rank: int, folder: str) -> None:
    _warm_up(folder)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(LAYERS)))
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    wire = 2 * sum(local_of(p).numel() for p in model.parameters())
    _step(model, optimizer, 0)  # the optimizer's own state is there from here on
    before = _resident()
    config = PublishConfig(
        url=f"{folder}/chain", dtype="BF16", when_busy="wait", part_nbytes=32 << 20
    )
    with Publisher(config).attach(model) as publisher:
        found: list[dict[str, Any]] = []
        for number in range(STEPS):
            step_s = _step(model, optimizer, number + 1)
            _resident()  # gradients are gone
            _reset_peak()
            distributed.barrier()
            start = time.perf_counter()
            future = publisher.publish(step=number)
            seen_s = time.perf_counter() - start
            future.result()
            found.append({"step_s": step_s, "seen_s": seen_s, "peak": _peak() - before})
        facts = {"wire": wire, "versions": found[1:]}  # the first one warms up
    (Path(folder) / f"{rank}.json").write_text(json.dumps(facts))


def _warm_up(folder: str) -> None:
    model = nn.Linear(1024, 1024)
    fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    with Publisher(PublishConfig(url=f"{folder}/warm", dtype="BF16")).attach(model) as publisher:
        for number in range(2):
            _step(model, optimizer, number)
            publisher.publish().result()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        sharded: Any = parameter
        drawn = torch.randn(local_of(parameter).shape, generator=generator)
        parameter.grad = DTensor.from_local(drawn, sharded.device_mesh, sharded.placements)
    start = time.perf_counter()
    optimizer.step()
    taken = time.perf_counter() - start
    optimizer.zero_grad()
    return taken


def _resident() -> int:
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(field)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ranks.bench")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--ranks", default="1,2,4", help="how many, with commas")
    asked = parser.parse_args()
    counts = [int(count) for count in asked.ranks.split(",")]
    found = {count: _measured(count) for count in counts}
    columns = (f"{count} rank{'s' * (count > 1)}" for count in counts)
    millions = LAYERS * 4 * WIDTH * WIDTH / 1e6
    table = report.grid(f"{millions:.0f} M parameters under FSDP2, a rank", "", *columns)
    for name, (label, scale) in ROWS.items():
        table.add_row(label, *(f"{found[count][name] * scale:.0f}" for count in counts))
    document = {"benchmark": "ranks", "ranks": found, "machine": report.machine()}
    caveat = "Medians over versions, of the slowest rank; more ranks than cores take turns."
    report.emit(document, [table], json_output=asked.json, caveat=caveat)
    return 0


def _measured(ranks: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        run("tests.ranks.bench:measure", ranks, folder)
        facts = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    found = {"wire": max(fact["wire"] for fact in facts)}
    figures: dict[str, Callable[[list[float]], float]] = {
        "step_s": median,
        "seen_s": median,
        "peak": max,
    }
    for name, figure in figures.items():
        found[name] = max(figure([one[name] for one in fact["versions"]]) for fact in facts)
    return found


if __name__ == "__main__":
    sys.exit(main())
