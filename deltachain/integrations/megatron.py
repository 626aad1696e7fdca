"""Megatron: every rank publishes its own shards, under the names of Hugging Face checkpoints.

mbridge knows what its export does with each weight of megatron-core; here it does so with element
numbers instead of weights, so that no weight leaves its rank. Ran with mbridge 0.15.1 and
megatron-core 0.16.1; what is read of them has no public name.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from deltachain.errors import UnsupportedModelError
from deltachain.publish.model.flat_shards import FlatShard
from deltachain.publish.model.layout import is_sharded
from deltachain.publish.model.source import MovedExport
from deltachain.torch_names import named_tensors, unwrapped

_EXPERT: Final = ".mlp.experts.linear_fc"
_ASKED: Final = (
    "mpu",
    "_weight_name_mapping_mcore_local_to_global",
    "_weight_merge_across_tp",
    "_weight_to_hf_format",
)
_VOCABULARY: Final = ("embedding.word_embeddings.weight", "output_layer.weight")


def shards(bridge: Any, models: Sequence[nn.Module]) -> MovedExport:  # noqa: ANN401 - of mbridge
    """Return the export of a rank's shards, for ``Publisher.attach`` on every rank.

    Tensor, pipeline (with virtual stages), expert and data parallelism, and the distributed
    optimizer. Publish after each step of the optimizer.

    Args:
        bridge: The bridge of mbridge, such as ``AutoBridge.from_pretrained(...)``.
        models: What ``bridge.get_model`` returned.

    Raises:
        UnsupportedModelError: The bridge is another library's, or does not export a weight; ranks
            get the weights of a step only later, or FSDP divides them.

    Examples:
        >>> publisher = Publisher(url).attach(shards(bridge, models))    # doctest: +SKIP
        >>> optimizer.step()                                             # doctest: +SKIP
        >>> publisher.publish(step=1)                                    # doctest: +SKIP
    """
    _check(bridge, models)
    named = bridge._weight_name_mapping_mcore_local_to_global
    chunks = [(model, named(model)) for model in map(unwrapped, models)]
    weights = dict(_named(chunks))

    def live() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in _named(chunks):
            whole = _whole(bridge, name, tensor)
            if not name.endswith(_VOCABULARY):
                yield name, _shard(bridge, name, tensor, whole)
                continue
            # No checkpoint has the rows that fill it up; of tied weights, two stages have copies.
            for there, saved in _saved(bridge, name, [whole], tensor).items():
                yield there, _shard(bridge, name, tensor, saved)

    def moved(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        saved: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            mine = weights.get(name)
            saved |= {name: tensor} if mine is None else _moved(bridge, name, tensor, mine)
        return saved

    return MovedExport(live, moved)


def _check(bridge: Any, models: Sequence[nn.Module]) -> None:  # noqa: ANN401
    if missing := [name for name in _ASKED if not hasattr(bridge, name)]:
        raise UnsupportedModelError(
            f"{type(bridge).__name__} has no {missing[0]!r}: expected a bridge of mbridge 0.15",
            hint="publish whole tensors: attach(lambda: bridge.export_hf_weights(models)), or what "
            "its export is called",
        )
    for module in (module for model in models for module in model.modules()):
        if getattr(getattr(module, "ddp_config", None), "overlap_param_gather", False):
            raise UnsupportedModelError(
                "with overlap_param_gather, a rank gets weights of a step in its next forward pass",
                hint="set overlap_param_gather=False",
            )


def _named(chunks: Sequence[tuple[nn.Module, Mapping[str, str]]]) -> Iterator[tuple[str, Tensor]]:
    """Yield a rank's tensors by their names in the whole model of Megatron."""
    for model, names in chunks:
        for name, tensor in named_tensors(model, names):
            if name not in names or is_sharded(tensor):
                raise UnsupportedModelError(
                    f"{type(model).__name__} divides {name!r} in a way of its own",
                    hint="use_distributed_optimizer instead of FSDP of torch or Megatron",
                )
            if isinstance(tensor, nn.Parameter) or "expert_bias" in name:
                yield names[name], tensor


def _moved(bridge: Any, name: str, whole: Tensor, mine: Tensor) -> dict[str, Tensor]:  # noqa: ANN401
    count, parts = _place(bridge, name, mine)[1], [whole]
    if count > 1:
        parts = list(whole.chunk(count) if whole.dim() == mine.dim() else whole.unbind())
    return _saved(bridge, name, parts, mine)


def _saved(bridge: Any, name: str, parts: list[Tensor], mine: Tensor) -> dict[str, Tensor]:  # noqa: ANN401
    """Return what the bridge makes of a weight, of which ranks of tensor parallelism have parts."""
    try:
        merged = bridge._weight_merge_across_tp(name, parts, mine) if parts[1:] else parts[0]
        return dict(zip(*bridge._weight_to_hf_format(name, merged), strict=True))
    except Exception as exc:
        raise UnsupportedModelError(
            f"{type(bridge).__name__} does not export {name!r} of {len(parts)} parts: {exc!r}",
            hint="a bridge that exports this model, divided so, is needed: see mbridge's models; "
            "it has no expert_tensor_parallel_size above 1 without tensor parallelism",
        ) from exc


def _place(bridge: Any, name: str, tensor: Tensor) -> tuple[int, int]:  # noqa: ANN401
    """Return the number of this rank's part of a weight, and how many parts there are."""
    mpu = bridge.mpu
    if _EXPERT in name:
        return mpu.etp_rank, mpu.etp_size
    is_divided = getattr(tensor, "tensor_model_parallel", False)
    return (mpu.tp_rank, mpu.tp_size) if is_divided else (0, 1)


def _whole(bridge: Any, name: str, tensor: Tensor) -> Tensor:  # noqa: ANN401
    """Return all parts of a weight, one after another, without data.

    Parts of rows are joined: the rows of several checkpoint tensors may alternate across them.
    """
    count = _place(bridge, name, tensor)[1]
    shape = (count, *tensor.shape) if count > 1 else tensor.shape
    if getattr(tensor, "partition_dim", None) == 0:
        shape = (count * tensor.shape[0], *tensor.shape[1:])
    return torch.empty(shape, device="meta")


def _shard(bridge: Any, name: str, tensor: Tensor, whole: Tensor) -> Tensor:  # noqa: ANN401
    """Return a rank's part as a run of elements of the first rows of all parts."""
    if whole.shape == tensor.shape:
        return tensor
    start = min(_place(bridge, name, tensor)[0] * tensor.numel(), whole.numel())
    held = tensor.detach().view(-1)[: whole.numel() - start]
    return FlatShard.of(held, start, tuple(whole.shape), tensor)
