"""Local shard of a live tensor."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from deltachain.errors import UnsupportedModelError
from deltachain.publish.model.layout import Box

INSTEAD: Final = "publish checkpoints with `deltachain push`, or an iterator of whole tensors"
"""Hint for trainers with shards of unknown position."""


def local_shard(name: str, tensor: Tensor) -> tuple[Tensor, Box]:
    """Return the local part of a tensor and its box, without communication.

    ``tensor`` is a parameter or a buffer; a ``DTensor`` under FSDP2, tensor or expert parallelism.
    """
    if not is_sharded(tensor):
        return tensor, Box.whole(tuple(tensor.shape))
    sharded: Any = tensor
    if any(placement.is_partial() for placement in sharded.placements):
        raise UnsupportedModelError(
            f"{name!r} is a partial sum on every rank: no rank has bits of it",
            hint="redistribute it before attaching",
        )
    full, local = tuple(sharded.shape), sharded.to_local()
    if sharded.device_mesh.get_coordinate() is None:  # the tensor is on other ranks
        return local, Box(full, (0,) * len(full), (0,) * len(full))
    rows = [_rows(sharded, dim) for dim in range(len(full))]
    offset = tuple(int(kept[0]) if len(kept) else 0 for kept in rows)
    shape = tuple(len(kept) for kept in rows)
    if any(len(kept) and int(kept[-1] - kept[0]) + 1 != len(kept) for kept in rows):
        raise UnsupportedModelError(
            f"{name!r}: {sharded.placements} gives a rank rows that are not neighbours",
            hint=INSTEAD,
        )
    if tuple(local.shape) != shape:
        raise UnsupportedModelError(
            f"{name!r}: this rank holds {tuple(local.shape)}, {sharded.placements} says {shape}",
            hint="attach and publish between steps, when everything is sharded again",
        )
    return local, Box(full, offset, shape)


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a ``DTensor``, without importing its slow module."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def local_of(tensor: Tensor) -> Tensor:
    sharded: Any = tensor
    local: Tensor = sharded.to_local() if is_sharded(tensor) else tensor
    return local


def _rows(sharded: Any, dim: int) -> Tensor:  # noqa: ANN401 - a DTensor
    """Return this rank's indices along one dimension, by sharding an ``arange`` equally."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # noqa: PLC0415

    def alike(placement: Any) -> Any:  # noqa: ANN401 - a placement
        if placement.is_replicate() or placement.dim != dim:
            return Replicate()
        factor = getattr(placement, "split_factor", None)  # set by FSDP over tensor parallelism
        return Shard(0) if factor is None else type(placement)(0, split_factor=factor)

    indices = torch.arange(sharded.shape[dim])
    placements = [alike(placement) for placement in sharded.placements]
    # Without a source rank, every rank splits its own copy.
    split = distribute_tensor(indices, sharded.device_mesh, placements, src_data_rank=None)
    return split.to_local().cpu()


def refuse_foreign(model: nn.Module) -> None:
    for module in model.modules():
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
            raise UnsupportedModelError(
                "the model is wrapped in FSDP1, which does not say where a piece belongs",
                hint=f"use FSDP2 (`fully_shard`; in Accelerate `fsdp_version: 2`), or {INSTEAD}",
            )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            raise UnsupportedModelError(
                f"{name!r} is partitioned by DeepSpeed, which does not say where a piece belongs",
                hint=INSTEAD,
            )
