"""The Trainer of transformers with a publishing callback, and a folder that follows it.

::

    python examples/02_hf_trainer.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import Qwen3ForCausalLM, Trainer, TrainingArguments

import deltachain
from deltachain.demo.model import make_model, make_tokenizer, save_checkpoint


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """A few sentences, repeated."""

    def __init__(self) -> None:
        lines = ["the small crow carries a bell.", "add 2 and 3: 5", "count: 1 2 3 4 5"]
        self.tokens = [torch.tensor(make_tokenizer().encode(line)[:8]) for line in lines]

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index % len(self.tokens)]
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder, url = Path(scratch), f"{scratch}/policy"
        save_checkpoint(make_model(0), make_tokenizer(), folder / "base")
        trainer = Trainer(
            model=Qwen3ForCausalLM.from_pretrained(folder / "base", dtype=torch.float32),
            args=TrainingArguments(
                output_dir=str(folder / "out"),
                max_steps=5,
                per_device_train_batch_size=1,
                learning_rate=1e-6,
                use_cpu=True,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=Sentences(),
            callbacks=[deltachain.DeltaChainCallback(url, when_busy="wait")],
        )
        trainer.train()

        # The same as `deltachain follow URL --out DIR`: a checkpoint folder at the newest version.
        with deltachain.Subscriber(url, folder / "replica") as replica:
            print(replica.update())
        served = Qwen3ForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16)
        with deltachain.Subscriber(url, served) as replica:
            replica.update()
        for (name, mine), theirs in zip(
            served.named_parameters(), trainer.model.parameters(), strict=True
        ):
            assert torch.equal(mine, theirs.to(torch.bfloat16)), name
        print("every bit is the trainer's")


if __name__ == "__main__":
    main()
