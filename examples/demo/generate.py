"""Text generation from a checkpoint folder, for the demo's follower."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.demo.process_setup import quiet_libraries


def load_for_generation(folder: Path) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Load bf16 model and tokenizer from a checkpoint folder, without network access."""
    with quiet_libraries():
        model = Qwen3ForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, local_files_only=True
        )
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    return model.eval(), tokenizer


def generate_text(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompt: str,
    *,
    max_new_tokens: int = 16,
) -> str:
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    generator: Any = model  # transformers' annotations reject Qwen3ForCausalLM as `self`
    with quiet_libraries(), torch.no_grad():
        output = generator.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
    continuation = output[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(continuation, skip_special_tokens=True))
