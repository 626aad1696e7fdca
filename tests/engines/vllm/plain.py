"""A worker whose linears and experts compute from their parameters, as those of an accelerator do.

Stock vLLM on a CPU packs them into handles of its kernels: nothing could be written in place, and
``/weight_checker`` would see no weight. Nor has it the collectives of data-parallel experts.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final

import torch
from torch import Tensor, distributed
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from tests.engines.vllm import strikes
from tests.engines.vllm.fresh import sharded_experts, unpacked

_KEPT: Final = ExitStack()
_KEPT.enter_context(unpacked())  # for as long as the process lives
_KEPT.enter_context(sharded_experts(packed=False))


def _gather(group: Any, given: Any, dim: int = 0, sizes: Sequence[int] | None = None) -> Any:
    if isinstance(given, list):
        return [_gather(group, one, dim, sizes) for one in given]
    sizes = sizes or [len(given)] * group.world_size
    padded = given.new_zeros(max(sizes), *given.shape[1:])
    padded[: len(given)] = given
    found = [torch.empty_like(padded) for _ in sizes]
    distributed.all_gather(found, padded, group=group.device_group)
    return torch.cat([one[:size] for one, size in zip(found, sizes, strict=True)])


def _scatter(group: Any, given: Tensor, dim: int = -1, sizes: Any = None) -> Any:
    del dim
    whole = given.contiguous().clone()
    distributed.all_reduce(whole, group=group.device_group)
    return whole.split(sizes or len(whole) // group.world_size)[group.rank_in_group]


CpuCommunicator.all_gatherv = _gather
CpuCommunicator.reduce_scatterv = _scatter


class WorkerExtension(strikes.WorkerExtension):
    pass
