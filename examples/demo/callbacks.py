"""Callbacks of a trainer: rewards of its steps, and the weights' bits at chosen ones."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import cast

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from examples.demo.compare_bits import dump_bits


class RewardCallback(TrainerCallback):
    """Calls ``on_reward`` with number and metrics of each step, ``reward`` among them."""

    def __init__(self, on_reward: Callable[[int, Mapping[str, float]], None]) -> None:
        self._on_reward = on_reward

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: object,
    ) -> None:
        del args, control
        if logs is not None and "reward" in logs:  # the final summary has no rewards
            self._on_reward(state.global_step, logs)


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
        self.on_step_end(args, state, control, **facts)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **facts: object
    ) -> None:
        del args, control
        if state.global_step in self._steps:
            self._folder.mkdir(parents=True, exist_ok=True)
            dump_bits(cast("torch.nn.Module", facts["model"]), self.path(state.global_step))
