"""TRL's GRPOTrainer, attached in one line after its creation.

::

    python examples/03_trl_grpo.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoTokenizer, Qwen3ForCausalLM
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

import deltachain
from deltachain.demo.corpus import questions, score
from deltachain.demo.model import make_model, make_tokenizer, save_checkpoint


def reward(completions: list[str], answer: list[int], **_: object) -> list[float | None]:
    return [score(text, right) for text, right in zip(completions, answer, strict=True)]


def main() -> None:
    asked = questions(64, seed=0)
    rows = {"prompt": [q.prompt for q in asked], "answer": [q.answer for q in asked]}
    with tempfile.TemporaryDirectory() as scratch:
        base, url = Path(scratch) / "base", f"{scratch}/policy"
        save_checkpoint(make_model(0), make_tokenizer(), base)
        trainer = GRPOTrainer(
            model=Qwen3ForCausalLM.from_pretrained(base, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(base),
            reward_funcs=reward,
            train_dataset=Dataset.from_dict(rows),
            args=GRPOConfig(
                output_dir=f"{scratch}/out",
                max_steps=3,
                per_device_train_batch_size=8,
                num_generations=4,
                max_completion_length=8,
                learning_rate=1e-6,
                use_cpu=True,
                bf16=False,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
            ),
        )
        callback = deltachain.attach(trainer, url=url, when_busy="wait")
        trainer.train()
        for receipt in callback.receipts:
            print(receipt)  # version 1 delta nnz 31,202 density 0.566% ...
        assert [receipt.step for receipt in callback.receipts] == [1, 2, 3]


if __name__ == "__main__":
    main()
