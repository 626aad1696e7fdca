"""Bridges of mbridge for the layers that megatron-core has without Transformer Engine."""

import re
from typing import Any, ClassVar

from mbridge.core import LLMBridge
from mbridge.models.qwen3 import Qwen3Bridge
from mbridge.models.qwen3moe import Qwen3MoEBridge
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from torch import nn

LAYER = "model.layers.{layer_number}."
ON_HOST: dict[str, Any] = {
    "use_cpu_initialization": True,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    "moe_grouped_gemm": False,
    "moe_token_dispatcher_type": "allgather",  # the other one makes streams
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "sequence_parallel": False,
    "variable_seq_lengths": False,
}


class Local(LLMBridge):  # type: ignore[misc]
    _OTHER_MAPPING: ClassVar = {"input_layernorm.weight": [LAYER + "input_layernorm.weight"]}

    def __init__(self, config: Any, **settings: Any) -> None:
        config.rope_theta = 10_000.0  # mbridge reads the name of transformers 4
        super().__init__(config, **settings)
        self.set_extra_args(**ON_HOST)

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
        self.has_vp_stage = True
        return get_gpt_decoder_block_spec(
            self.config, use_transformer_engine=False, vp_stage=vp_stage
        )


class LocalQwen3(Local, Qwen3Bridge):  # type: ignore[misc]
    _MLP_MAPPING = Qwen3Bridge._MLP_MAPPING | {
        "pre_mlp_layernorm.weight": [LAYER + "post_attention_layernorm.weight"]
    }


class LocalQwen3Moe(Local, Qwen3MoEBridge):  # type: ignore[misc]
    def _weight_name_mapping_mcore_local_to_global(
        self, model: nn.Module, consider_ep: bool = True
    ) -> dict[str, str]:
        names = super()._weight_name_mapping_mcore_local_to_global(model, consider_ep)
        first = self.mpu.ep_rank * self.config.num_moe_experts // self.mpu.ep_size
        first = first if consider_ep else 0

        def grouped(found: re.Match[str]) -> str:
            return f"experts.{found[2]}.weight{first + int(found[1])}"

        pattern = r"experts\.local_experts\.(\d+)\.(linear_fc.)\.weight"
        return {name: re.sub(pattern, grouped, there) for name, there in names.items()}
