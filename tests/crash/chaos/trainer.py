"""A trainer process: it takes a step, keeps its bits, and publishes them, until it is stopped.

::

    python -m tests.crash.chaos.trainer URL BASE WEIGHTS

The bits of each step lie in ``WEIGHTS`` before they are published, as the trainer itself has them:
no code of the package's readers and writers takes part. Started again, it goes on with the newest.
"""

import math
import os
import sys
import time
from itertools import count
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from deltachain.publish import PublishConfig, Publisher
from tests.engines.trainer import RATE, make_batches, masters_of, optimizer_steps

VERSION_S: Final = 1.0

KEPT: Final = 4000
"""Files of bits that stay, for answers that are judged late."""

SESSION: Final = "session"
"""Name in the metadata of a manifest: which process published it."""


BEGIN: Final = "begin"
"""In place of the step: what a process begins with. Its first version has the step before it."""


def file_of(session: str, step: int | str | None) -> str:
    return f"{session}-{step}.safetensors"


def keep(model: nn.Module, folder: Path, name: str) -> None:
    bits = {key: value.bfloat16().contiguous() for key, value in model.state_dict().items()}
    unfinished = folder / f"{name}.unfinished"
    save_file(bits, unfinished)
    unfinished.rename(folder / name)
    for old in by_age(folder)[:-KEPT]:
        old.unlink(missing_ok=True)  # another trainer may do the same


def by_age(folder: Path) -> list[Path]:
    found = []
    for path in folder.glob("*.safetensors"):
        try:
            found.append((path.stat().st_mtime_ns, path))
        except FileNotFoundError:
            continue
    return [path for _, path in sorted(found)]


def train(url: str, base: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    first = time.time_ns() // 1_000_000  # no process counts the steps of another one
    session, model = f"{first}-{os.getpid()}", masters_of(base)
    if before := by_age(folder):
        bits = load_file(before[-1])
        if all(value.isfinite().all() for value in bits.values()):
            model.load_state_dict({key: value.float() for key, value in bits.items()})
    keep(model, folder, file_of(session, BEGIN))
    config = PublishConfig(
        url=url,
        when_busy="wait",
        take_over=True,
        anchor_every=64,
        continue_reverted=True,
        metadata={SESSION: session},
    )
    steps = optimizer_steps(model, make_batches(os.getpid()), RATE)
    with Publisher(config).attach(model) as publisher:
        for step in count(first):
            due = time.monotonic() + VERSION_S
            if not math.isfinite(next(steps)):
                raise SystemExit("the model is no longer finite")
            keep(model, folder, file_of(session, step))
            publisher.publish(step=step)
            publisher.flush()
            time.sleep(max(0.0, due - time.monotonic()))


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
