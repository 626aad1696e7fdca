"""TRL's AsyncGRPOTrainer and a stock vLLM server, connected by a folder instead of a bucket.

::

    make venv-vllm
    python examples/04_async_grpo_vllm.py

`make demo-async` is the same with an S3 server, a game server, and fault tolerance.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from deltachain import DeltaChainWeightTransfer
from deltachain.demo.online.cpu import run_on_cpu
from deltachain.demo.online.engine import HOST, command, variables
from deltachain.demo.online.game_transcripts import environment_folder, transcripts
from deltachain.demo.online.processes import Service, free_port, until
from deltachain.demo.online.rollouts import GameTable, GameWorker
from deltachain.demo.online.run import answers
from deltachain.demo.pretrain import pretrain

TOKEN = "a secret of trainer and replica"  # noqa: S105


def train(base: Path, url: str, engine: str, environment: str, diary: Path) -> Any:
    run_on_cpu()  # not on a GPU: TRL's attention comes as a CUDA kernel
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    transfer = DeltaChainWeightTransfer(url, engines=[engine], token=TOKEN, wait="all")
    games = GameTable(
        engine=engine,
        kind="vllm",
        environment=environment,
        group=8,
        at_once=32,
        ahead=32,
        seed=0,
        diary=diary,
    )
    trainer = AsyncGRPOTrainer(
        model=str(base),
        args=AsyncGRPOConfig(
            output_dir=str(diary.parent / "out"),
            max_steps=3,
            per_device_train_batch_size=1,
            token_budget=1024,
            learning_rate=1e-5,
            dtype="float32",
            gradient_checkpointing=False,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": [""]}),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        processing_class=tokenizer,
        rollout_worker=GameWorker(games, tokenizer, lambda: transfer.version),
        weight_transfer=transfer,
    )
    transfer.attach(trainer)  # on every rank, so that no rank gathers the model
    trainer.train()
    return transfer


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder, url, ports = Path(scratch), f"{scratch}/policy", (free_port(), free_port())
        engine, environment = (f"http://{HOST}:{port}" for port in ports)
        pretrain(folder / "base", steps=60, text=transcripts)
        python = Path(".venv-vllm/bin/python").absolute()
        started = command("vllm", python, folder / "base", ports[0])
        given = {"DELTACHAIN_URL": url, "DELTACHAIN_TOKEN": TOKEN}
        server = [sys.executable, str(environment_folder() / "server.py")]
        server += ["--host", HOST, "--port", str(ports[1])]
        with (
            Service("replica", started, folder, variables("vllm") | given) as replica,
            Service("environment", server, folder, {}) as game,
        ):
            until(lambda: answers(f"{engine}/health"), replica, 240)
            until(lambda: answers(f"{environment}/healthz"), game, 60)
            transfer = train(folder / "base", url, engine, environment, folder / "samples.jsonl")
            print(transfer.announced)  # version 3 on 1 of 1, 0.21 s
            assert transfer.announced.stragglers == ()


if __name__ == "__main__":
    main()
