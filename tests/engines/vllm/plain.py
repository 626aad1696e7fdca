"""A worker whose linear layers compute from their parameters, as those of an accelerator do.

Stock vLLM on a CPU packs them into handles of its kernels: nothing could be written in place, and
``/weight_checker`` would see no weight. See :func:`tests.engines.vllm.fresh.unpacked`.
"""

from __future__ import annotations

from typing import Any

from torch.nn import functional
from vllm.model_executor.layers import utils

from tests.engines.vllm import strikes

_packing = utils.dispatch_cpu_unquantized_gemm


def _plain(layer: Any, remove_weight: bool) -> None:
    if layer.weight.ndim == 2:
        layer.cpu_linear = functional.linear
    else:
        _packing(layer, remove_weight)


utils.dispatch_cpu_unquantized_gemm = _plain


class WorkerExtension(strikes.WorkerExtension):
    pass
