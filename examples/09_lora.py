"""A PEFT adapter is a chain of its own, of a thousandth of the model's bytes.

Needs ``pip install 'deltachain[trl,s3]' peft``::

    DELTACHAIN_URL=s3://policies/adapter python examples/09_lora.py

``MODEL`` is a name on the Hub or a folder. Without ``DELTACHAIN_URL`` the chain is in a temporary
folder. A stock vLLM serves the versions as they come::

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve Qwen/Qwen3-0.6B --enable-lora --max-loras 3
    deltachain agent s3://policies/adapter --engine http://127.0.0.1:8000 \
      --out ADAPTERS --adapter policy

Prints a receipt of each version, and whether every bit of an adapter that is pulled is the
trainer's.
"""

import os
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import deltachain
from deltachain.cli.pull import pull
from deltachain.publish.model import lora

MODEL = os.environ.get("MODEL", "Qwen/Qwen3-0.6B")
URL = os.environ.get("DELTACHAIN_URL") or tempfile.mkdtemp()


def main() -> None:
    tokens = AutoTokenizer.from_pretrained(MODEL)("the small crow", return_tensors="pt")
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    publisher = deltachain.Publisher(URL).attach(
        lambda: lora.adapter_tensors(model), assets=lora.adapter_assets(model)
    )
    with publisher:
        for step in range(1, 4):
            model(**tokens, labels=tokens["input_ids"]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(publisher.publish(step=step).result())

    folder = Path(tempfile.mkdtemp()) / "adapter"
    pull(URL, out=folder)  # as `deltachain pull URL --out folder`
    (file,) = folder.glob("*.safetensors")
    pulled = load_file(file)
    for name, trained in lora.adapter_tensors(model):
        assert torch.equal(trained, pulled[name]), name
    print(f"version {publisher.version}: every bit of the adapter is the trainer's")


if __name__ == "__main__":
    main()
