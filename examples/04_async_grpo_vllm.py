"""TRL's AsyncGRPOTrainer and its own rollout worker, with stock vLLM servers that follow a chain.

Start each server, on any machine that reaches the bucket::

    DELTACHAIN_URL=s3://policies/run-1 DELTACHAIN_TOKEN=secret \
      VLLM_PLUGINS=deltachain,deltachain_http \
      vllm serve Qwen/Qwen3-0.6B --worker-extension-cls deltachain_vllm.WorkerExtension \
      --weight-transfer-config '{"backend": "deltachain"}'

A router before several of them (``pip install vllm-router``)::

    vllm-router --worker-urls http://a:8000 http://b:8000 --policy round_robin --port 8080

Then the trainer, with ``pip install 'deltachain[trl,s3]' vllm aiohttp``::

    DELTACHAIN_URL=s3://policies/run-1 DELTACHAIN_TOKEN=secret \
      ENGINES="http://a:8000 http://b:8000" ROUTER=http://localhost:8080 \
      python examples/04_async_grpo_vllm.py

Versions are announced to ``ENGINES``, rollouts are sampled from ``ROUTER``, which is the only
engine by default. ``MODEL`` is the name on the Hub or the folder that the servers serve. Prints a
receipt of each version, and how many engines hold the last.
"""

import os
import tempfile

import torch
from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from deltachain import DeltaChainWeightTransfer

MODEL = os.environ.get("MODEL", "Qwen/Qwen3-0.6B")
URL = os.environ.get("DELTACHAIN_URL", "s3://policies/run-1")
ENGINES = os.environ.get("ENGINES", "http://localhost:8000").split()
ROUTER = os.environ.get("ROUTER", ENGINES[0])
STEPS = int(os.environ.get("STEPS", "50"))


def right(completions: list[list[dict[str, str]]], answer: list[int], **_: object) -> list[float]:
    """Return 1 for an answer that is right, less the longer it is."""
    texts = [messages[-1].get("content") or "" for messages in completions]
    return [
        float(str(number) in text) - len(text) / 1000
        for text, number in zip(texts, answer, strict=True)
    ]


def main() -> None:
    sums = [(a, b) for a in range(10, 20) for b in range(10, 20)]
    rows = [
        {"prompt": [{"role": "user", "content": f"{a} + {b} = ?"}], "answer": a + b}
        for a, b in sums
    ]
    token = os.environ.get("DELTACHAIN_TOKEN", "")
    transfer = DeltaChainWeightTransfer(URL, engines=ENGINES, token=token, wait="all")
    trainer = AsyncGRPOTrainer(
        model=MODEL,
        reward_funcs=right,
        train_dataset=Dataset.from_list(rows),
        args=AsyncGRPOConfig(
            output_dir=tempfile.mkdtemp(),
            vllm_server_base_url=ROUTER,
            dtype="float32",
            max_steps=STEPS,
            per_device_train_batch_size=1,
            num_generations=4,
            max_completion_length=32,
            token_budget=1024,
            max_inflight_tasks=16,
            learning_rate=1e-6,
            chat_template_kwargs={"enable_thinking": False},
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        weight_transfer=transfer,
    )
    transfer.attach(trainer)  # on every rank, so that no rank gathers the model
    trainer.train()
    for receipt in transfer.receipts:
        print(receipt)  # version 1 delta nnz 31,202 density 0.566% ...
    print(transfer.announced)  # version 50 on 2 of 2, 0.21 s


if __name__ == "__main__":
    main()
