"""Runs of elements of a parameter, as FSDP1 and DeepSpeed ZeRO-3 leave them on a rank."""

import sys
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from deltachain.errors import UnsupportedModelError
from deltachain.publish.model.layout import INSTEAD
from deltachain.torch_names import named_modules, named_tensors


class FlatShard(Tensor):
    """A rank's run of the elements of a parameter, with the methods of a ``DTensor``.

    Its shape is that of the whole parameter. ``placements`` are the flat indices of its elements,
    ``owner`` the tensor that an optimizer writes to, which counts writes.
    """

    placements: range
    device_mesh: None
    owner: Tensor
    _local: Tensor

    @classmethod
    def of(cls, local: Tensor, start: int, shape: tuple[int, ...], owner: Tensor) -> "FlatShard":
        made: FlatShard = Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device, requires_grad=owner.requires_grad
        )
        made.placements, made.device_mesh = range(start, start + local.numel()), None
        made.owner, made._local = owner, local.detach()
        made._is_param = True  # what isinstance(_, nn.Parameter) reads
        return made

    def to_local(self) -> Tensor:
        return self._local

    @property
    def _version(self) -> int:  # type: ignore[override]
        return self.owner._version

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:  # noqa: ANN401
        raise NotImplementedError(f"{func} of a flat shard: take its to_local()")


def is_fsdp1(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def gathers_state(model: nn.Module) -> bool:
    """Return whether ``state_dict`` of a model gathers it, on all ranks."""
    return any(map(is_fsdp1, model.modules()))


def named_shards(
    model: nn.Module, saved: Collection[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield what ``named_tensors`` does, with flat shards where a rank has runs of elements.

    ``saved``: names in the ``state_dict`` of the model, if known.
    """
    flat: dict[str, Tensor] = {}
    made: dict[int, Tensor] = {}  # tied parameters have one shard
    if gathers_state(model):
        flat, saved = dict(_of_fsdp1(model)), set(saved_names(model))
    known = set(map(id, _flat_parameters(model)))
    for name, tensor in named_tensors(model, saved):
        if name not in flat and id(tensor) not in known:
            if hasattr(tensor, "_fsdp_flattened"):
                raise UnsupportedModelError(
                    f"{name!r} is a part of an FSDP1 module outside of the model",
                    hint="give the outermost module that FSDP1 made",
                )
            if id(tensor) not in made:
                made[id(tensor)] = _of_zero3(name, tensor) if hasattr(tensor, "ds_id") else tensor
            yield name, made[id(tensor)]
    yield from flat.items()


def refuse_flat(model: nn.Module) -> None:
    if gathers_state(model) or any(hasattr(one, "ds_id") for one in model.parameters()):
        raise UnsupportedModelError(
            "FSDP1 and ZeRO-3 leave runs of elements on a rank, which this export does not join",
            hint="use FSDP2 (`fully_shard`; in Accelerate `fsdp_version: 2`), or ZeRO-2",
        )


def saved_names(model: nn.Module) -> Iterator[str]:
    """Yield the names in the ``state_dict`` of an FSDP1 model, which gathers it when called."""
    for _, path, module in named_modules(model):
        own = nn.Module.get_extra_state is not type(module).get_extra_state
        if own or (module._state_dict_hooks and not is_fsdp1(module)):
            raise UnsupportedModelError(
                f"{path or 'the model'!r} changes its state_dict(), which FSDP1 gathers to say",
                hint=f"use FSDP2 (`fully_shard`; in Accelerate `fsdp_version: 2`), or {INSTEAD}",
            )
        tensors = {**module._parameters, **module._buffers}
        yield from (path + name for name in tensors.keys() - module._non_persistent_buffers_set)


def _of_fsdp1(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    paths: dict[int, list[str]] = {}
    for _, path, module in named_modules(model):
        paths.setdefault(id(module), []).append(path)
    for flat in _flat_parameters(model):
        for (module, name), shard in _runs(flat).items():
            yield from ((path + name, shard) for path in paths[id(module)])


def _flat_parameters(model: nn.Module) -> list[Any]:
    handles = [getattr(one, "_handle", None) for one in model.modules() if is_fsdp1(one)]
    return [handle.flat_param for handle in handles if handle is not None]


def _runs(flat: Any) -> dict[tuple[nn.Module, str], Tensor]:  # noqa: ANN401 - a FlatParameter
    """Return the runs in a flat parameter: torch 2.7 to 2.13 have no public name for them.

    What is read is checked against the parameters that FSDP1 shows, and by ``check_cover``.
    """
    local, found = getattr(flat, "_local_shard", flat).detach(), dict[Any, Tensor]()
    is_shown = flat._params and flat.data_ptr() == local.data_ptr()  # not whole at the moment
    originals = flat._params or [flat] * len(flat._param_infos)
    rows = zip(flat._param_infos, flat._shapes, flat._shard_param_infos, originals, strict=True)
    for number, (info, shape, run, original) in enumerate(rows):
        if flat._param_extensions[number] or not flat._contiguities[number]:
            raise UnsupportedModelError(
                f"{info.param_name!r} was sharded or not contiguous before FSDP1 made it flat",
                hint=f"use FSDP2 (`fully_shard`), or {INSTEAD}",
            )
        held, start = local[:0], 0
        if run.in_shard:
            start = run.intra_param_start_idx
            held = local.narrow(0, run.offset_in_shard, run.numel_in_shard)
        if is_shown and _memory(original) != _memory(held):
            raise UnsupportedModelError(
                f"{info.param_name!r} is not where FSDP1 of torch {torch.__version__} says",
                hint=f"attach and publish between steps; otherwise {INSTEAD}",
            )
        found[info.module, info.param_name] = FlatShard.of(held, start, shape, original)
    for one in flat._shared_param_infos:
        found[one.module, one.param_name] = found[one.prim_module, one.prim_param_name]
    return found


def _memory(tensor: Tensor) -> tuple[int, int]:
    return tensor.numel(), tensor.data_ptr() if tensor.numel() else 0


def _of_zero3(name: str, parameter: Any) -> Tensor:  # noqa: ANN401 - with DeepSpeed's attributes
    shard, numel = parameter.ds_tensor, parameter.ds_numel
    is_quantised, is_mics = hasattr(shard, "ds_quant_scale"), hasattr(parameter, "comm")
    if is_quantised or is_mics or shard.status.name != "AVAILABLE":
        raise UnsupportedModelError(
            f"{name!r} is quantised by DeepSpeed, offloaded to NVMe, or sharded by MiCS",
            hint="use ZeRO-3 without zero_quantized_nontrainable_weights and mics_shard_size, and "
            "offload to the CPU",
        )
    number = torch.distributed.get_rank(parameter.ds_process_group)
    start = min(shard.ds_numel * number, numel)
    held = shard.narrow(0, 0, min(shard.ds_numel, numel - start))
    return FlatShard.of(held, start, parameter.ds_shape, parameter)
