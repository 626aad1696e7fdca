"""Callback of a trainer that reads the rewards of its steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class RewardCallback(TrainerCallback):
    """Calls ``on_reward`` with the metrics of each step."""

    @abstractmethod
    def on_reward(self, step: int, logs: Mapping[str, float]) -> None: ...

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: object,
    ) -> None:
        del args, control
        if logs is not None and "reward" in logs:
            self.on_reward(state.global_step, logs)
