"""Qwen3 models of several sizes, and chains of changes drawn for them.

Nothing is trained: a model of 600 M parameters would take this machine days. What decides the cost
of an update is how many elements change, where they lie, and how well their steps compress; so the
changes are drawn to look like those that were measured on real updates. Every element of a matrix
changes with the same chance, independently of the others, which leaves no two changes in a cache
line together more often than training does. A step moves the bf16 bits by one in nine of ten cases,
by two in nine of ten of the rest, and so on, up or down alike. Norms change a tenth as often: they
lie near one, where a unit in the last place is large.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from deltachain.publish import PublishConfig, Publisher
from tests.bench.report import say
from tests.engines.bench.figures import Drawn

CONTEXT: Final = 512

SINGLE: Final = 0.9
"""Share of steps by one unit in the last place; of the others, the share by two; and so on."""

NORMS: Final = 0.1
"""Changes of a norm, as a share of those of a matrix of its size."""

_SPREAD: Final = 0.02

_SMALLEST: Final = 1e-6
"""Least magnitude: the bits before those of zero are those of a NaN."""


def _sized(hidden: int, intermediate: int, layers: int, heads: int, vocab: int) -> Qwen3Config:
    return Qwen3Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=128,
        vocab_size=vocab,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )


def _mixture(layers: int, experts: int) -> Qwen3MoeConfig:
    """Return a mixture of many tiny experts: what it costs is their number."""
    return Qwen3MoeConfig(
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_experts=experts,
        num_experts_per_tok=8,
        num_hidden_layers=layers,
        num_attention_heads=1,
        num_key_value_heads=1,
        vocab_size=2048,
        max_position_embeddings=CONTEXT,
        dtype=torch.bfloat16,
    )


SIZES: Final[Mapping[str, PretrainedConfig]] = MappingProxyType(
    {
        "2M": _sized(256, 768, 2, 2, 2048),
        "19M": _sized(512, 1536, 4, 4, 12288),
        "170M": _sized(1024, 3072, 8, 16, 43008),
        "596M": _sized(1024, 3072, 28, 16, 151936),  # the very shapes of Qwen3-0.6B
        "1.2B": _sized(2048, 6144, 18, 16, 151936),
        "1.7B": _sized(2048, 6144, 28, 16, 151936),  # of Qwen3-1.7B
        "4.0B": _sized(2560, 9728, 36, 32, 151936),  # nearly of Qwen3-4B, which has 8 heads of keys
        "18k tensors": _mixture(48, 128),
        "192 tensors": _mixture(2, 32),
    }
)
"""Dense models by number of parameters, and mixtures by number of expert tensors. The smallest of
each try the benchmark itself."""


def draw(size: str, folder: Path, densities: Sequence[float]) -> Drawn:
    say(f"{size}: drawing a model and {len(densities)} versions")
    model, random = _model(size), np.random.default_rng(7)
    base, url = folder / "base", (folder / "chain").resolve().as_uri()
    model.save_pretrained(base)
    # No anchor but version 0, which is the checkpoint: followers never start anew in here.
    config = PublishConfig(url=url, base=base, anchor_factor=1e9, when_busy="wait")
    receipts = []
    with Publisher(config) as publisher:
        publisher.attach(model, assets={})
        for step, density in enumerate(densities, 1):
            change(model, density, random)
            receipts.append(publisher.publish(step=step).result())
    return Drawn(
        size=size,
        base=base,
        url=url,
        densities=tuple(densities),
        nnz=tuple(receipt.nnz for receipt in receipts),
        nbytes=tuple(receipt.nbytes for receipt in receipts),
        numel=sum(parameter.numel() for parameter in model.parameters()),
    )


def change(model: nn.Module, density: float, random: np.random.Generator) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            bits = bits_of(parameter)
            share = density if parameter.ndim > 1 else density * NORMS
            at = _positions(bits.size, share, random)
            steps = random.geometric(SINGLE, at.size).astype(np.int16)
            steps *= random.choice(np.array([-1, 1], np.int16), at.size)
            bits[at] += steps.view(np.uint16)


def bits_of(tensor: Tensor) -> npt.NDArray[np.uint16]:
    flat: npt.NDArray[np.int16] = tensor.detach().view(-1).view(torch.int16).numpy()
    return flat.view(np.uint16)


def _positions(numel: int, density: float, random: np.random.Generator) -> npt.NDArray[np.int64]:
    """Flat indices that each are drawn with the same chance: by the gaps between them."""
    most = int(numel * density + 10 * (numel * density) ** 0.5 + 10)
    at = np.cumsum(random.geometric(density, most)) - 1
    return at[: np.searchsorted(at, numel)]


def _model(size: str) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(SIZES[size])
    model.to_empty(device="cpu").bfloat16()
    model.tie_weights()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0 if parameter.ndim > 1 else 1, _SPREAD, generator=generator)
            parameter.masked_fill_(parameter.abs() < _SMALLEST, _SPREAD)
    return model
