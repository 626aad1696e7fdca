"""Experts of other ranks, passed over as kernels of GPUs do: SGLang's for CPUs ends at their -1."""

from collections.abc import Callable
from typing import Any

from deltachain_sglang import compat


def _local(original: Callable[..., Any], layer: Any, x: Any, routed: Any, config: Any) -> Any:
    ids = routed.topk_ids
    # One expert a row: of experts that a row has twice, SGLang computes one.
    kept = (routed.topk_weights * (ids >= 0)).reshape(-1, 1)
    each = routed._replace(topk_weights=kept, topk_ids=ids.clamp(min=0).reshape(-1, 1))
    found = original(layer, x.repeat_interleave(ids.shape[1], 0), each, config)
    return found.float().view(*ids.shape, -1).sum(1).to(found.dtype)


compat.hook("sglang.srt.layers.moe.fused_moe_native.moe_forward_native", _local)
