"""CPU support for TRL's asynchronous trainer: attention over packed rows.

TRL downloads a CUDA kernel for it. Here each segment of a row attends to the path from its root by
torch's scaled dot product: the same result, slower.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from trl.experimental.async_grpo import async_grpo_trainer, packing


def tree_attention(  # noqa: PLR0913 - TRL calls it so
    module: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    tree_kv_index: Tensor,
    tree_cu_seqlens_q: Tensor,
    tree_cu_seqlens_k: Tensor,
    scaling: float | None = None,
    **_: Any,  # noqa: ANN401 - longest lengths, which only the kernel needs
) -> tuple[Tensor, None]:
    """Replace :func:`trl.experimental.async_grpo.packing.tree_attention` on a CPU."""
    del module, attention_mask
    q = query[0]  # (heads, tokens, head_dim)
    groups = q.shape[0] // key.shape[1]
    k, v = (x[0].index_select(1, tree_kv_index).repeat_interleave(groups, 0) for x in (key, value))
    ends_q, ends_k = tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
    parts = []
    for begin, end, first, last in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        rows, columns = end - begin, last - first
        mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        parts.append(
            scaled_dot_product_attention(
                q[:, begin:end], k[:, first:last], v[:, first:last], attn_mask=mask, scale=scaling
            )
        )
    return torch.cat(parts, dim=1).transpose(0, 1).unsqueeze(0), None


def run_on_cpu() -> None:
    packing.tree_attention = tree_attention
    setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)  # noqa: B010 - no export
