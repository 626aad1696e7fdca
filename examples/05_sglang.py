"""A stock SGLang server follows a chain and labels its tokens with the version.

Start the server, on any machine that reaches the bucket::

    DELTACHAIN_URL=s3://policies/run-1 DELTACHAIN_TOKEN=secret DELTACHAIN_FOLLOW=1 \
      python -m sglang.launch_server --model-path Qwen/Qwen3-0.6B --port 30000

Then the trainer, with ``pip install 'deltachain[trl,s3]'``::

    DELTACHAIN_URL=s3://policies/run-1 DELTACHAIN_TOKEN=secret ENGINE=http://localhost:30000 \
      python examples/05_sglang.py

``MODEL`` is the name on the Hub or the folder that the server serves. Prints a receipt of each
version, and a text with the versions that sampled its tokens.
"""

import os
import time

import httpx
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import deltachain
from deltachain.control import ReplicaClient

MODEL = os.environ.get("MODEL", "Qwen/Qwen3-0.6B")
URL = os.environ.get("DELTACHAIN_URL", "s3://policies/run-1")
ENGINE = os.environ.get("ENGINE", "http://localhost:30000")


def main() -> None:
    tokens = AutoTokenizer.from_pretrained(MODEL)("the small crow", return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    with deltachain.Publisher(URL).attach(model) as publisher:
        for step in range(1, 4):
            model(**tokens, labels=tokens["input_ids"]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(publisher.publish(step=step).result())

    with ReplicaClient(ENGINE, token=os.environ.get("DELTACHAIN_TOKEN", "")) as replica:
        while replica.status().version != publisher.version:  # it looks for versions by itself
            time.sleep(0.1)
    body = {"text": "the small crow", "sampling_params": {"max_new_tokens": 8}}
    answer = httpx.post(f"{ENGINE}/generate", json=body, timeout=60).raise_for_status().json()
    print(answer["text"], answer["meta_info"]["weight_versions"])


if __name__ == "__main__":
    main()
