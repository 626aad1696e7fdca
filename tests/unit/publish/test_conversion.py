"""What transformers makes of a model's tensors when it saves them, found by numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.core_model_loading import (
    Chunk,
    GroupWeightRename,
    Transpose,
    WeightConverter,
    revert_weight_conversion,
)

from deltachain.errors import ConfigError
from deltachain.publish.model.source import ModelTensors, collect_weights
from deltachain.publish.snapshot import wire_bits
from tests.support.models import bits_of

TINY: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def moe() -> PreTrainedModel:
    extra: dict[str, Any] = {
        "moe_intermediate_size": 12,
        "num_experts": 3,
        "num_experts_per_tok": 2,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**TINY, **extra))


def renamed() -> PreTrainedModel:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    config = GPTNeoXConfig(**{n: TINY[n] for n in names}, num_attention_heads=2)
    return GPTNeoXForCausalLM(config)


def transposed() -> Any:
    """One whose checkpoint has a layer the other way round."""
    model: Any = Qwen3ForCausalLM(Qwen3Config(**TINY))
    turn = WeightConverter("mlp.up_proj.turned", "mlp.up_proj.weight", [Transpose(0, 1)])
    model._weight_conversions = [turn]
    return model


def joined() -> Any:
    """One whose checkpoint has queries, keys and values in one tensor."""
    model: Any = Qwen3ForCausalLM(Qwen3Config(**TINY | {"num_key_value_heads": 2}))
    parts = [f"self_attn.{kind}_proj.weight" for kind in "qkv"]
    model._weight_conversions = [WeightConverter("self_attn.qkv.weight", parts, [Chunk(dim=0)])]
    return model


def shifted() -> Any:
    """One that names a norm as its checkpoint names another, and only if the other is there."""
    model: Any = Qwen3ForCausalLM(Qwen3Config(**TINY))
    there = ["a_layernorm", "input_layernorm"]
    model._weight_conversions = [
        GroupWeightRename(there, ["input_layernorm", "post_attention_layernorm"])
    ]
    return model


def as_checkpoint(source: ModelTensors) -> dict[str, bytes]:
    """What a follower would write: every tensor put together from windows."""
    found = {spec.name: bytearray(spec.nbytes) for spec in source.specs}
    for weight in source.live_weights():
        bits = wire_bits(weight)
        for spec, select, indices in weight.element_map.windows(7):
            view = np.frombuffer(found[spec.name], bits.dtype)
            view[np.asarray(indices)] = bits[select]
    return {name: bytes(data) for name, data in found.items()}


@pytest.mark.parametrize("make", [moe, renamed, transposed, joined, shifted])
def test_the_checkpoint_is_what_save_pretrained_writes(make: object) -> None:
    model = make()  # type: ignore[operator]
    for number, parameter in enumerate(model.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    plain = {name: p.detach() for name, p in model.named_parameters()}
    expected = revert_weight_conversion(model, plain)
    source = collect_weights(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    assert {spec.name: spec.shape for spec in source.specs} == shapes
    truth = {name: bits_of({name: t})[name].tobytes() for name, t in expected.items()}
    assert as_checkpoint(source) == truth


def test_layers_of_one_shape_share_their_table() -> None:
    tables = {
        id(w.element_map.table)
        for w in collect_weights(transposed()).weights
        if "up_proj" in w.spec.name
    }
    assert len(tables) == 1


def test_converted_tensors_whose_names_depend_on_others_are_refused() -> None:
    model: Any = Qwen3ForCausalLM(Qwen3Config(**TINY))
    model._weight_conversions = [
        GroupWeightRename(["mlp.a_proj", "mlp.down_proj"], ["mlp.down_proj", "mlp.gate_proj"]),
        WeightConverter("mlp.gate_proj.turned", "mlp.gate_proj.weight", [Transpose(0, 1)]),
    ]
    with pytest.raises(ConfigError, match=r"down_proj\.turned.*were found instead"):
        collect_weights(model)


def test_values_that_are_computed_when_saving_are_refused() -> None:
    class Doubled(Transpose):
        @property
        def reverse_op(self) -> Doubled:
            return self

        def convert(self, input_dict: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
            (name, tensors), *_ = input_dict.items()
            tensor = tensors[0] if isinstance(tensors, list) else tensors
            return {name: tensor * 2}

    model: Any = Qwen3ForCausalLM(Qwen3Config(**TINY))
    model._weight_conversions = [
        WeightConverter("mlp.up_proj.weight", "mlp.up_proj.weight", [Doubled(0, 1)])
    ]
    with pytest.raises(ConfigError, match="computed anew"):
        collect_weights(model)
