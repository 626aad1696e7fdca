"""The Trainer of transformers, attached in one line, and a copy of the model that follows.

Needs ``pip install 'deltachain[trl]'``, and ``[s3]`` or ``[hf]`` for a bucket::

    DELTACHAIN_URL=s3://policies/run-1 python examples/02_hf_trainer.py

``MODEL`` is a name on the Hub or a folder. Without ``DELTACHAIN_URL`` the chain is in a temporary
folder. Prints a receipt of each version, and whether every bit of the copy is the trainer's.
"""

import os
import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import deltachain

MODEL = os.environ.get("MODEL", "Qwen/Qwen3-0.6B")
URL = os.environ.get("DELTACHAIN_URL") or tempfile.mkdtemp()


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokens = tokenizer("the small crow carries a bell.")["input_ids"]
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        args=TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            max_steps=5,
            per_device_train_batch_size=1,
            learning_rate=1e-6,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"input_ids": tokens, "labels": tokens}] * 8),
    )
    callback = deltachain.attach(trainer, url=URL, when_busy="wait")
    trainer.train()
    for receipt in callback.receipts:
        print(receipt)  # version 1 delta nnz 31,202 density 0.566% ...

    # On any machine, at any time: a copy that starts from the same checkpoint.
    copy = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    with deltachain.Subscriber(URL, copy) as subscriber:
        print(subscriber.update())
    trained = dict(trainer.model.named_parameters())
    for name, parameter in copy.named_parameters():
        assert torch.equal(parameter, trained[name].to("cpu", torch.bfloat16)), name
    print(f"version {subscriber.version}: every bit is the trainer's")


if __name__ == "__main__":
    main()
