"""Benchmark of anchors in a folder, beside floors of the same run.

Weights are normal, in tensors of 8 MB. A publisher attaches, with its first anchor, to a new chain;
an attached one makes an anchor by itself, all but its record; a newcomer joins from nothing. Each
is done as in a training or serving process, with all threads.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from deltachain.codec.frames import FRAME, deflate_stream
from deltachain.publish import Publisher
from deltachain.publish.session import Attempt, EdgeShare, Session
from deltachain.subscribe import Subscriber
from deltachain.threads import cores
from tests.bench import report
from tests.bench.report import Candidate, Timings, round_robin, say

NBYTES: Final = 256_000_000

WIDTH: Final = 2048

STD: Final = 0.02

ROUNDS: Final = 5

ATTACH: Final = "attach with first anchor"
ANCHOR: Final = "anchor by itself"
NEWCOMER: Final = "newcomer"
ZSTD: Final = "floor: zstd of the high bytes"
WRITE: Final = "floor: write of the anchor"
"""Floors are of one thread, as core-seconds: each pass is needed, and all threads share them."""


class Bench:
    def __init__(self, folder: Path, nbytes: int) -> None:
        count = max(1, round(nbytes / (2 * WIDTH * WIDTH)))
        layers = [nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(count)]
        self.model, self._folder = nn.Sequential(*layers), folder
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_(0, STD, generator=generator)
        self.nbytes = sum(parameter.nbytes for parameter in self.model.parameters())
        self._publisher = Publisher(str(folder / "kept")).attach(self.model, alone=True)
        self.share = self.anchor()
        self.anchor_nbytes = self.share.edge.nbytes
        self._live: dict[str, Tensor] = {}

    def close(self) -> None:
        self._publisher.close()

    @property
    def session(self) -> Session:
        return self._publisher._require_session()

    def attach(self) -> None:
        Publisher(str(self._folder / "new")).attach(self.model, alone=True).close()

    def anchor(self) -> EdgeShare:
        keys = self.session._keys("anchor", self.session.head)
        return self.session._put_share(keys, Attempt(topic="bench"))

    def prepare_newcomer(self) -> None:
        self._live = {
            name: torch.zeros_like(parameter) for name, parameter in self.model.named_parameters()
        }

    def join(self) -> None:
        Subscriber(str(self._folder / "kept"), self._live).update()

    def check_newcomer(self) -> None:
        self.prepare_newcomer()
        self.join()
        for name, parameter in self.model.named_parameters():
            if not torch.equal(self._live[name].view(torch.int16), parameter.view(torch.int16)):
                raise ArithmeticError(f"a newcomer holds other bits of {name}")

    def candidates(self) -> list[Candidate]:
        weights = [parameter.detach() for parameter in self.model.parameters()]
        bits = [weight.view(-1).view(torch.int16).numpy() for weight in weights]
        high = np.concatenate([array.view(np.uint8)[1::2] for array in bits])
        parts = [(self._folder / "kept" / part.key).read_bytes() for part in self.share.edge.parts]
        new, anchors = self._folder / "new", self._folder / "kept" / "anchors"
        kept = {path.name for path in anchors.iterdir()}
        return [
            Candidate(ATTACH, self.attach, partial(shutil.rmtree, new, ignore_errors=True)),
            Candidate(ANCHOR, self.anchor, partial(_remove_others, anchors, kept)),
            Candidate(NEWCOMER, self.join, self.prepare_newcomer),
            Candidate(ZSTD, partial(_compress, high)),
            Candidate(WRITE, partial(_write, self._folder / "written", parts)),
        ]


def _remove_others(folder: Path, kept: set[str]) -> None:
    for path in folder.iterdir():
        if path.name not in kept:
            shutil.rmtree(path)


def _compress(plane: Any) -> None:
    for at in range(0, plane.size, FRAME):
        deflate_stream(plane[at : at + FRAME].data)


def _write(path: Path, parts: Sequence[bytes]) -> None:
    with path.open("wb") as out:
        for part in parts:
            out.write(part)
        out.flush()
        os.fsync(out.fileno())
    path.unlink()


def rows(timings: Timings, nbytes: int) -> list[dict[str, Any]]:
    whole = (ATTACH, ANCHOR, NEWCOMER)
    return [
        report.speeds(name, timings, nbytes) | {"threads": cores() if name in whole else 1}
        for name in timings.seconds
    ]


def run(*, nbytes: int = NBYTES, rounds: int = ROUNDS) -> Mapping[str, Any]:
    say(f"a model of {nbytes / 1e6:.0f} MB in bf16")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="deltachain-bench-")))
        bench = Bench(folder, nbytes)
        stack.callback(bench.close)
        bench.check_newcomer()
        found = rows(round_robin(bench.candidates(), rounds), bench.nbytes)
        return {
            "benchmark": "anchor",
            "dense_nbytes": bench.nbytes,
            "anchor_nbytes": bench.anchor_nbytes,
            "of_dense": bench.anchor_nbytes / bench.nbytes,
            "parts": len(bench.share.edge.parts),
            "rounds": rounds,
            "rows": found,
            "machine": report.machine(),
        }


def main(*, json_output: bool, nbytes: int = NBYTES) -> int:
    result = run(nbytes=nbytes)
    title = (
        f"Anchors of {result['dense_nbytes'] / 1e6:.0f} MB of bf16 weights, N(0, {STD}), in a "
        f"folder: {result['of_dense']:.4f} of dense, {result['parts']} parts"
    )
    table = report.grid(title, "", "best ms", "median ms", "dense GB/s", "threads")
    for row in result["rows"]:
        table.add_row(
            row["name"],
            f"{row['best_s'] * 1e3:.0f}",
            f"{row['median_s'] * 1e3:.0f}",
            f"{row['gb_per_s']:.2f}",
            str(row["threads"]),
        )
    caveat = "The best of some repetitions, in turn. On a busy machine trust only the ratios."
    report.emit(result, [table], json_output=json_output, caveat=caveat)
    return 0
