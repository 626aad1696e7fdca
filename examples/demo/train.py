"""Reinforcement learning on the demo's sums with TRL's GRPO trainer."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from datasets import Dataset
from transformers import (
    AutoTokenizer,
    PrinterCallback,
    Qwen3ForCausalLM,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from typing_extensions import override

from examples.demo.corpus import questions, score
from examples.demo.process_setup import quiet_libraries, spare_one_core
from examples.demo.reward_callback import RewardCallback

STEPS: Final = 20
LEARNING_RATE: Final = 1e-6

_COMPLETIONS: Final = 64
_GROUP: Final = 4
_COMPLETION_TOKENS: Final = 8
_QUESTIONS: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoStep:
    step: int
    reward: float
    spread: float
    flat_groups: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoReport:
    steps: tuple[GrpoStep, ...]
    seconds: float


def run_grpo(
    checkpoint: Path,
    *,
    callbacks: Sequence[TrainerCallback] = (),
    steps: int = STEPS,
    learning_rate: float = LEARNING_RATE,
    seed: int = 0,
    progress: Callable[[GrpoStep], None] | None = None,
) -> GrpoReport:
    diary = _StepLog(progress)
    with (
        quiet_libraries(),
        spare_one_core(),
        tempfile.TemporaryDirectory(prefix="deltachain-grpo-") as scratch,
    ):
        trainer = GRPOTrainer(
            model=Qwen3ForCausalLM.from_pretrained(
                checkpoint, dtype=torch.float32, local_files_only=True
            ),
            processing_class=AutoTokenizer.from_pretrained(checkpoint, local_files_only=True),
            reward_funcs=_rewards,
            train_dataset=_dataset(seed),
            args=_arguments(scratch, steps=steps, learning_rate=learning_rate, seed=seed),
            callbacks=[diary, *callbacks],
        )
        trainer.remove_callback(PrinterCallback)
        start = time.monotonic()
        trainer.train()
        seconds = time.monotonic() - start
    return GrpoReport(steps=tuple(diary.steps), seconds=seconds)


def _arguments(scratch: str, *, steps: int, learning_rate: float, seed: int) -> GRPOConfig:
    return GRPOConfig(
        output_dir=scratch,
        max_steps=steps,
        learning_rate=learning_rate,
        lr_scheduler_type="constant",
        per_device_train_batch_size=_COMPLETIONS,
        num_generations=_GROUP,
        max_completion_length=_COMPLETION_TOKENS,
        gradient_checkpointing=False,
        seed=seed,
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def _dataset(seed: int) -> Dataset:
    asked = questions(_QUESTIONS, seed=seed)
    return Dataset.from_dict(
        {
            "prompt": [question.prompt for question in asked],
            "answer": [question.answer for question in asked],
        }
    )


def _rewards(completions: list[str], answer: list[int], **_: object) -> list[float | None]:
    return [score(text, right) for text, right in zip(completions, answer, strict=True)]


class _StepLog(RewardCallback):
    def __init__(self, progress: Callable[[GrpoStep], None] | None) -> None:
        self.steps: list[GrpoStep] = []
        self._progress = progress
        self._began = 0.0
        self._took = 0.0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        del args, state, control
        self._began = time.monotonic()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        del args, state, control
        self._took = time.monotonic() - self._began

    @override
    def on_reward(self, step: int, logs: Mapping[str, float]) -> None:
        done = GrpoStep(
            step=step,
            reward=logs["reward"],
            spread=logs["reward_std"],
            flat_groups=logs["frac_reward_zero_std"],
            seconds=self._took,
        )
        self.steps.append(done)
        if self._progress is not None:
            self._progress(done)
