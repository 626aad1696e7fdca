"""Dumps the trainer's bits at chosen steps, for the oracle to compare with a follower's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import cast

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from deltachain.demo.oracle import dump_bits


class OracleCallback(TrainerCallback):
    """Writes ``step-<number>.npz`` at the end of each chosen step, straight from the model.

    Args:
        folder: Where the dumps go; made when the first is written.
        steps: Global steps to dump after; 0 is the state before the first.
    """

    def __init__(self, folder: Path, *, steps: Collection[int]) -> None:
        self._folder = folder
        self._steps = frozenset(steps)

    def path(self, step: int) -> Path:
        """Where the dump of one step is, once it has been written."""
        return self._folder / f"step-{step:06d}.npz"

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **facts: object
    ) -> None:
        """Dump the state that training starts from, if it was asked for."""
        del args, control
        self._dump(facts, state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **facts: object
    ) -> None:
        """Dump the state after the step, if it was asked for."""
        del args, control
        self._dump(facts, state.global_step)

    def _dump(self, facts: Mapping[str, object], step: int) -> None:
        if step in self._steps:
            model = cast("torch.nn.Module", facts["model"])
            self._folder.mkdir(parents=True, exist_ok=True)
            dump_bits(model, self.path(step))
