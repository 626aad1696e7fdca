"""Reinforcement learning on the demo's sums with TRL's GRPO trainer."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
from datasets import Dataset
from transformers import (
    AutoTokenizer,
    PrinterCallback,
    Qwen3ForCausalLM,
    TrainerCallback,
)
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from examples.demo.callbacks import RewardCallback
from examples.demo.corpus import questions, score
from examples.demo.process_setup import quiet_libraries, spare_one_core

STEPS: Final = 20
LEARNING_RATE: Final = 1e-6

_COMPLETIONS: Final = 64
_GROUP: Final = 4
_COMPLETION_TOKENS: Final = 8
_QUESTIONS: Final = 1024


def run_grpo(
    checkpoint: Path,
    *,
    callbacks: Sequence[TrainerCallback] = (),
    steps: int = STEPS,
    learning_rate: float = LEARNING_RATE,
    seed: int = 0,
    progress: Callable[[int, float], None] = lambda *_: None,
) -> None:
    """Train, and tell the reward of each step."""
    rewards = RewardCallback(lambda step, logs: progress(step, logs["reward"]))
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
            callbacks=[rewards, *callbacks],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


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
