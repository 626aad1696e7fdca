"""Checkpoints with quantised weights, as the usual tools write them; made of random bits."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

Tensors: TypeAlias = dict[str, Tensor]

GROUP: Final = 32
"""Columns of GPTQ that have a scale in common."""

INT8: Final[Mapping[str, Any]] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel",
                        "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "int", "symmetric": True,
                                  "strategy": "token", "dynamic": True},
        }
    },
}  # fmt: skip

KEYS_AND_VALUES: Final[Mapping[str, Any]] = {
    **INT8,
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor",
                        "dynamic": False},
}  # fmt: skip

GPTQ: Final[Mapping[str, Any]] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": GROUP,
    "desc_act": False,
    "sym": True,
    "lm_head": False,
}

_LINEAR: Final = re.compile(r"^model\.layers\.\d+\..*_proj\.weight$")
_ATTENTION: Final = re.compile(r"^(model\.layers\.\d+\.self_attn)\.k_proj\.weight$")


def to_int8(saved: Tensors) -> Tensors:
    made = dict(saved)
    for name, weight in _linears(saved):
        made[name] = _random(name, weight.shape, torch.int8)
        made[f"{name}_scale"] = torch.empty(weight.shape[0], 1, dtype=torch.bfloat16)
    return made


def with_scales(saved: Tensors) -> Tensors:
    prefixes = [found[1] for name in saved if (found := _ATTENTION.match(name))]
    scales = [f"{prefix}.{kind}_scale" for prefix in prefixes for kind in "kv"]
    return to_int8(saved) | {name: torch.empty(1, dtype=torch.bfloat16) for name in scales}


def to_gptq(saved: Tensors) -> Tensors:
    made = dict(saved)
    for name, weight in _linears(saved):
        del made[name]
        rows, columns = weight.shape
        layer, groups = name.removesuffix(".weight"), columns // GROUP
        for part, shape in (("qweight", (columns // 8, rows)), ("qzeros", (groups, rows // 8))):
            made[f"{layer}.{part}"] = _random(f"{layer}.{part}", shape, torch.int32)
        made[f"{layer}.scales"] = torch.empty(groups, rows, dtype=torch.bfloat16)
        made[f"{layer}.g_idx"] = torch.arange(columns, dtype=torch.int32) // GROUP
    return made


def _linears(saved: Tensors) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, tensor) for name, tensor in saved.items() if _LINEAR.match(name))


def _random(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, shape, generator=generator, dtype=dtype)
