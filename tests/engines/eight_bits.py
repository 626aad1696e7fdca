"""Checkpoints of W8A8 in transformers: weights and activations rounded as the engines do it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SCALE = "_scale"

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def is_quantised(checkpoint: Path) -> bool:
    return "quantization_config" in json.loads((checkpoint / "config.json").read_text())


def load(checkpoint: Path, dtype: torch.dtype) -> PreTrainedModel:
    """A model whose linear layers round as kernels of eight bits do.

    Weights are codes times scales. The activations of a token become codes of the same dtype, the
    largest magnitude the last one: compressed-tensors' dynamic strategy ``token``.
    """
    tensors = {n: t for f in checkpoint.glob("*.safetensors") for n, t in load_file(f).items()}
    configuration = AutoConfig.from_pretrained(checkpoint, local_files_only=True)
    del configuration.quantization_config
    made: PreTrainedModel = AutoModelForCausalLM.from_config(configuration, dtype=torch.float32)
    codes = {name: tensor for name, tensor in tensors.items() if tensor.dtype in LARGEST}
    floats = {name: tensor for name, tensor in tensors.items() if name not in codes}
    scales = {name: floats.pop(name + SCALE).float() for name in codes}
    weights = {name: tensor.float() * scales[name] for name, tensor in codes.items()}
    absent, unexpected = made.load_state_dict(floats | weights, strict=False)
    tied = {name for name in absent if name == "lm_head.weight"}
    assert not unexpected
    assert set(absent) <= tied
    made.tie_weights()
    for name, tensor in codes.items():
        layer = made.get_submodule(name.removesuffix(".weight"))
        layer.register_forward_pre_hook(partial(_round_activations, tensor.dtype))
    return cast("PreTrainedModel", nn.Module.to(made, dtype).eval())


def _round_activations(
    dtype: torch.dtype, _: nn.Module, given: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    activations = cast("Tensor", given[0])
    largest = activations.float().abs().amax(-1, keepdim=True).clamp_min(1e-7)
    steps = largest / LARGEST[dtype]
    codes = activations.float() / steps
    rounded = codes.round() if dtype == torch.int8 else codes.to(dtype).float()
    return ((rounded * steps).to(activations.dtype), *given[1:])
