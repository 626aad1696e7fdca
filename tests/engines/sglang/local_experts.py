"""Experts of other ranks, passed over as kernels of GPUs do: SGLang's for CPUs ends at their -1."""

from collections.abc import Callable
from typing import Any

from deltachain_sglang import compat


def _local(original: Callable[..., Any], layer: Any, x: Any, routed: Any, config: Any) -> Any:
    ids = routed.topk_ids
    kept = routed.topk_weights * (ids >= 0)
    return original(layer, x, routed._replace(topk_weights=kept, topk_ids=ids.clamp(min=0)), config)


compat.hook("sglang.srt.layers.moe.fused_moe_native.moe_forward_native", _local)
