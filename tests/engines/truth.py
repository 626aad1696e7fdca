"""What a server should hold and say at a version, found without any of the code under test.

Weights are judged by their bits: the checkpoint is cut into the shards of each rank by hand. Tokens
are judged by transformers, in fp32 on the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

MARGIN: Final = 0.25
"""Logits below the best one at which a token is not the greedy choice: both engines round."""

_FUSED: Final = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_BY_COLUMN: Final = ("o_proj", "down_proj")
_BY_ROW: Final = ("embed_tokens", "lm_head")


def sharded(checkpoint: Path, tp: int = 1) -> dict[str, Tensor]:
    """Every parameter that the engines make of a llama-like checkpoint, by rank and name."""
    tensors = {
        n: t for file in checkpoint.glob("*.safetensors") for n, t in load_file(file).items()
    }
    return {
        f"tp{rank}:{name}": shard
        for rank in range(tp)
        for name, shard in _shards(tensors, rank, tp).items()
    }


def _shards(tensors: dict[str, Tensor], rank: int, tp: int) -> dict[str, Tensor]:
    found = {}
    for name, tensor in tensors.items():
        *path, layer, kind = name.split(".")
        fused = next((f for f, parts in _FUSED.items() if layer in parts), "")
        if fused:
            whole = ".".join([*path, fused, kind])
            parts = [tensors[".".join([*path, part, kind])] for part in _FUSED[fused]]
            found[whole] = torch.cat([part.chunk(tp)[rank] for part in parts])
        elif layer in _BY_COLUMN:
            found[name] = tensor.chunk(tp, dim=1)[rank]
        elif layer in _BY_ROW:
            found[name] = tensor.chunk(tp)[rank]
        else:
            found[name] = tensor
    return found


class Judge:
    """Says whether tokens are what a checkpoint would have gone on with.

    Args:
        checkpoint: Of one version.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, local_files_only=True
        ).eval()

    def wrong(
        self, prompt: Sequence[int], tokens: Sequence[int], which: Iterable[int]
    ) -> list[int]:
        """Those of some positions whose token is not the greedy one after all before it."""
        with torch.no_grad():
            inputs = torch.tensor([[*prompt, *tokens]])
            logits = self._model(input_ids=inputs).logits[0, len(prompt) - 1 : -1]
        gap = logits.amax(-1) - logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        return [position for position in which if gap[position] > MARGIN]
