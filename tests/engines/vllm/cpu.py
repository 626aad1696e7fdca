"""What vLLM's kernels do on this CPU: not all of them run on each."""

# ruff: noqa: PLC0415 - vLLM is imported when it is used: collecting tests must not need it

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn


def packs_linears() -> bool:
    """Whether linear layers are packed: oneDNN has no such kernel of bf16 below AVX-512."""
    from vllm.model_executor.layers import utils

    layer = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    return not layer.weight.numel()


def has_fp8_cache() -> bool:
    """Whether keys and values can be kept in fp8: the condition of vLLM's backend for CPUs."""
    return torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()


def multiplies_codes_exactly() -> bool:
    """Whether int8 products are exact sums: without VNNI, oneDNN's saturate at 16 bits."""
    from vllm import _custom_ops

    weight, scales = torch.full((64, 64), 127, dtype=torch.int8), torch.ones(64, 1)
    packed = _custom_ops.create_onednn_scaled_mm(weight.t(), scales, torch.float32, True, False)
    codes, found = torch.full((1, 64), 127, dtype=torch.int8), torch.empty(1, 64)
    _custom_ops.onednn_scaled_mm(packed, codes, found, torch.ones(1, 1), None, None, None)
    return bool((found == 64 * 127 * 127).all())


@contextmanager
def packed_linears() -> Iterator[None]:
    """Pack linear layers as they are where :func:`packs_linears`; elsewhere into copies.

    Of a packed layer nobody can read a weight, whichever kernel has it.
    """
    from vllm.model_executor.layers import utils

    dispatch = utils.dispatch_cpu_unquantized_gemm

    def pack(layer: Any, remove_weight: bool) -> None:
        dispatch(layer, remove_weight)
        if layer.weight.ndim != 2 or not layer.weight.numel():
            return
        held = layer.weight.detach().clone()
        layer.cpu_linear = lambda x, _, bias: nn.functional.linear(x, held, bias)
        if remove_weight:
            layer.weight = nn.Parameter(held.new_empty(0), requires_grad=False)

    with patch.object(utils, "dispatch_cpu_unquantized_gemm", pack):
        yield
