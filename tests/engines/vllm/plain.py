"""A worker whose linears and experts compute from their parameters, as those of an accelerator do.

Stock vLLM on a CPU packs them into handles of its kernels: nothing could be written in place, and
``/weight_checker`` would see no weight.
"""

from contextlib import ExitStack
from typing import Final

from tests.engines.vllm import strikes
from tests.engines.vllm.fresh import sharded_experts, unpacked

_KEPT: Final = ExitStack()
_KEPT.enter_context(unpacked())  # for as long as the process lives
_KEPT.enter_context(sharded_experts(packed=False))


class WorkerExtension(strikes.WorkerExtension):
    pass
