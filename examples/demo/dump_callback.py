"""Trainer callback that dumps the weights' bits at chosen steps, to compare with a follower's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import cast

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from examples.demo.compare_bits import dump_bits


class DumpCallback(TrainerCallback):
    """Writes ``step-<number>.npz`` at the end of each chosen step, straight from the model."""

    def __init__(self, folder: Path, *, steps: Collection[int]) -> None:
        self._folder = folder
        self._steps = frozenset(steps)

    def path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}.npz"

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **facts: object
    ) -> None:
        del args, control
        self._dump(facts, state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **facts: object
    ) -> None:
        del args, control
        self._dump(facts, state.global_step)

    def _dump(self, facts: Mapping[str, object], step: int) -> None:
        if step in self._steps:
            model = cast("torch.nn.Module", facts["model"])
            self._folder.mkdir(parents=True, exist_ok=True)
            dump_bits(model, self.path(step))
