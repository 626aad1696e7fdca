"""TRL's GRPOTrainer, attached in one line: each optimizer step is a version for replicas elsewhere.

Needs ``pip install 'deltachain[trl,hf]'``, and a bucket: ``hf buckets create me/policy``::

    DELTACHAIN_URL=hf://buckets/me/policy/run-1 python examples/03_trl_grpo.py

``MODEL`` is a name on the Hub or a folder. Without ``DELTACHAIN_URL`` the chain is in a temporary
folder. Prints a receipt of each version.
"""

import os
import tempfile

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import deltachain

MODEL = os.environ.get("MODEL", "Qwen/Qwen3-0.6B")
URL = os.environ.get("DELTACHAIN_URL") or tempfile.mkdtemp()


def right(completions: list[str], answer: list[int], **_: object) -> list[float | None]:
    """Return 1 for an answer that is right, less the longer it is."""
    return [
        float(str(number) in text) - len(text) / 1000
        for text, number in zip(completions, answer, strict=True)
    ]


def main() -> None:
    sums = [(a, b) for a in range(10, 20) for b in range(10, 20)]
    rows = [{"prompt": f"{a} + {b} =", "answer": a + b} for a, b in sums]
    trainer = GRPOTrainer(
        model=MODEL,
        reward_funcs=right,
        train_dataset=Dataset.from_list(rows),
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            model_init_kwargs={"dtype": "float32"},
            max_steps=3,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=8,
            learning_rate=1e-6,
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
    )
    callback = deltachain.attach(trainer, url=URL, when_busy="wait")
    trainer.train()
    for receipt in callback.receipts:
        print(receipt)  # version 1 delta nnz 31,202 density 0.566% ...


if __name__ == "__main__":
    main()
