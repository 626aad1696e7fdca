# /// script
# requires-python = ">=3.11"
# dependencies = ["deltachain[torch,s3,hf]", "transformers"]
# ///
"""Train a causal language model, and publish a version every few steps."""

import os
import signal
import time
from contextlib import suppress
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import deltachain


def main() -> None:
    told: SimpleQueue[int] = SimpleQueue()  # a handler may put into it at any moment
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: told.put(number))

    model: Any = AutoModelForCausalLM.from_pretrained(os.environ["MODEL"], dtype=torch.float32)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    learning_rate = float(os.environ.get("LEARNING_RATE", "1e-6"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    attachment = deltachain.attach(
        model,
        optimizer,
        url=os.environ["DELTACHAIN_URL"],
        every_steps=int(os.environ.get("EVERY_STEPS", "1")),
        dtype="BF16",
        metrics=os.environ.get("METRICS"),
    )
    steps, step_s = int(os.environ.get("STEPS", "0")), float(os.environ.get("STEP_S", "0"))
    for step in count(1):
        began = time.monotonic()
        tokens = torch.randint(model.config.vocab_size, (2, 32), device=model.device)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()  # publishes: training waits for the diff alone
        optimizer.zero_grad()
        if step == steps:
            break
        with suppress(Empty):
            told.get(timeout=max(0.0, began + step_s - time.monotonic()))
            break
    attachment.detach()  # waits for the last commit


if __name__ == "__main__":
    main()
