"""A stock SGLang server follows a chain and labels its tokens with the version.

::

    make venv-sglang
    python examples/05_sglang.py
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import httpx
import torch
from transformers import Qwen3ForCausalLM

import deltachain
from deltachain.control import ReplicaClient
from deltachain.demo.model import make_model, make_tokenizer, save_checkpoint
from deltachain.demo.online.engine import HOST, command, variables
from deltachain.demo.online.processes import Service, free_port, until
from deltachain.demo.online.run import answers

TOKEN = "a secret of trainer and replica"  # noqa: S105


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        base, url, port = Path(scratch) / "base", f"{scratch}/policy", free_port()
        save_checkpoint(make_model(0), make_tokenizer(), base)
        engine = f"http://{HOST}:{port}"
        started = command("sglang", Path(".venv-sglang/bin/python").absolute(), base, port)
        given = {
            "DELTACHAIN_URL": url,
            "DELTACHAIN_TOKEN": TOKEN,
            "DELTACHAIN_FOLLOW": "1",
            "DELTACHAIN_POLL_S": "0.2",
        }
        with Service("replica", started, Path(scratch), variables("sglang") | given) as replica:
            until(lambda: answers(f"{engine}/health"), replica, 240)
            model = Qwen3ForCausalLM.from_pretrained(base, dtype=torch.float32)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
            with deltachain.Publisher(url).attach(model) as publisher:
                for step in range(1, 4):
                    tokens = torch.randint(5, 500, (2, 16))
                    model(input_ids=tokens, labels=tokens).loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    print(publisher.publish(step=step).result())
            with ReplicaClient(engine, token=TOKEN) as client:
                while client.status().version != publisher.version:
                    time.sleep(0.1)
            body = {"text": "the small crow", "sampling_params": {"max_new_tokens": 8}}
            answer = httpx.post(f"{engine}/generate", json=body, timeout=60).json()
            print(answer["text"], answer["meta_info"]["weight_versions"])
            assert answer["meta_info"]["weight_versions"][-1]["version"] == "3"


if __name__ == "__main__":
    main()
