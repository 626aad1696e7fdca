"""Megatron: every rank publishes its own shards, under the names of Hugging Face checkpoints.

mbridge knows what its export does with each weight of megatron-core; here it does so with element
numbers instead of weights, so that no weight leaves its rank. Ran with mbridge 0.15.1 and
megatron-core 0.16.1; what is read of them has no public name.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from torch import Tensor, nn

from deltachain.errors import UnsupportedModelError
from deltachain.publish.model.flat_shards import FlatShard
from deltachain.publish.model.source import MovedExport
from deltachain.torch_names import named_tensors, unwrapped

_EXPERT: Final = ".mlp.experts.linear_fc"
_ASKED: Final = (
    "mpu",
    "vocab_size",
    "_weight_name_mapping_mcore_local_to_global",
    "_weight_name_mapping_mcore_to_hf",
    "_weight_merge_across_tp",
    "_weight_to_hf_format",
)
_FIRST, _LAST = "embedding.word_embeddings.weight", "output_layer.weight"


def shards(bridge: Any, models: Sequence[nn.Module]) -> MovedExport:  # noqa: ANN401 - of mbridge
    """Return the export of a rank's shards, for ``Publisher.attach`` on every rank.

    Tensor, pipeline (with virtual stages), expert and data parallelism, and the distributed
    optimizer. Publish after each step of the optimizer.

    Args:
        bridge: The bridge of mbridge, such as ``AutoBridge.from_pretrained(...)``.
        models: What ``bridge.get_model`` returned, wrapped or not.

    Raises:
        UnsupportedModelError: The bridge is another library's, or has no name for a weight; or
            ranks get the weights of a step only later.

    Examples:
        >>> publisher = Publisher(url).attach(shards(bridge, models))    # doctest: +SKIP
        >>> optimizer.step()                                             # doctest: +SKIP
        >>> publisher.publish(step=1)                                    # doctest: +SKIP
    """
    _check(bridge, models)
    weights = dict(_named(bridge, models))

    def live() -> Iterator[tuple[str, Tensor]]:
        return ((name, _shard(bridge, name, tensor)) for name, tensor in weights.items())

    def moved(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        saved: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if _is_vocabulary(name):
                saved[_saved(bridge, name)[0]] = tensor
                continue
            mine, merged = weights[name], tensor
            count = _place(bridge, name, mine)[1]
            if count > 1:
                parts = tensor.chunk(count) if tensor.dim() == mine.dim() else tensor.unbind()
                merged = bridge._weight_merge_across_tp(name, list(parts), mine)
            saved |= zip(*bridge._weight_to_hf_format(name, merged), strict=True)
        return saved

    return MovedExport(live, moved)


def _check(bridge: Any, models: Sequence[nn.Module]) -> None:  # noqa: ANN401
    if missing := [name for name in _ASKED if not hasattr(bridge, name)]:
        raise UnsupportedModelError(
            f"{type(bridge).__name__} has no {missing[0]!r}: expected a bridge of mbridge 0.15",
            hint="publish whole tensors: attach(lambda: bridge.export_hf_weights(models)), or what "
            "its export is called",
        )
    for model in models:
        if getattr(getattr(model, "ddp_config", None), "overlap_param_gather", False):
            raise UnsupportedModelError(
                "with overlap_param_gather, a rank gets weights of a step in its next forward pass",
                hint="set overlap_param_gather=False",
            )


def _named(bridge: Any, models: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:  # noqa: ANN401
    """Yield a rank's tensors by their names in the whole model of Megatron."""
    for model in map(unwrapped, models):
        names = bridge._weight_name_mapping_mcore_local_to_global(model)
        for name, tensor in named_tensors(model):
            # Of tied embeddings, the last stage has a copy.
            is_copy = name == _LAST and _saved(bridge, _FIRST) == _saved(bridge, _LAST)
            if (isinstance(tensor, nn.Parameter) or "expert_bias" in name) and not is_copy:
                _saved(bridge, names[name])
                yield names[name], tensor


def _saved(bridge: Any, name: str) -> list[str]:  # noqa: ANN401
    try:
        found: list[str] = bridge._weight_name_mapping_mcore_to_hf(name)
    except (NotImplementedError, LookupError) as exc:
        raise UnsupportedModelError(
            f"{type(bridge).__name__} has no name for {name!r}: {exc}",
            hint="a bridge that exports this model is needed: see mbridge's models",
        ) from exc
    return found


def _is_vocabulary(name: str) -> bool:
    return name.endswith((_FIRST, _LAST))


def _place(bridge: Any, name: str, tensor: Tensor) -> tuple[int, int]:  # noqa: ANN401
    """Return the number of this rank's part of a weight, and how many parts there are."""
    mpu = bridge.mpu
    if _EXPERT in name:
        return mpu.etp_rank, mpu.etp_size
    is_divided = getattr(tensor, "tensor_model_parallel", False)
    return (mpu.tp_rank, mpu.tp_size) if is_divided else (0, 1)


def _shard(bridge: Any, name: str, tensor: Tensor) -> Tensor:  # noqa: ANN401
    """Return a rank's part as a run of all parts, one after another.

    Parts of rows are joined: the rows of several checkpoint tensors may alternate across them.
    """
    number, count = _place(bridge, name, tensor)
    start, shape = number * tensor.numel(), (count, *tensor.shape)
    if getattr(tensor, "partition_dim", None) == 0:
        shape = (count * tensor.shape[0], *tensor.shape[1:])
    if _is_vocabulary(name):  # no checkpoint has the rows that fill it up
        rows, width = bridge.vocab_size or count * tensor.shape[0], tensor.shape[1]
        start, shape = min(start, rows * width), (rows, width)
    elif count == 1:
        return tensor
    held = tensor.detach().view(-1)[: math.prod(shape) - start]
    return FlatShard.of(held, start, shape, tensor)
