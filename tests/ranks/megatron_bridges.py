"""Bridges of mbridge for the layers that megatron-core has without Transformer Engine."""

import re
from typing import Any, ClassVar

import torch
from mbridge.core import LLMBridge
from mbridge.models.deepseek_v3 import DeepseekV3Bridge
from mbridge.models.llama import LLaMABridge
from mbridge.models.qwen2moe import Qwen2MoEBridge
from mbridge.models.qwen3 import Qwen3Bridge
from mbridge.models.qwen3moe import Qwen3MoEBridge
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

LAYER = "model.layers.{layer_number}."
ON_HOST: dict[str, Any] = {
    "use_cpu_initialization": True,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    "moe_grouped_gemm": False,
    "moe_shared_expert_overlap": False,
    "attention_backend": "auto",
    "moe_token_dispatcher_type": "allgather",  # the other one makes streams
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "sequence_parallel": False,
    "variable_seq_lengths": False,
}


class GroupedLinear(nn.Module):
    """Weights of Transformer Engine's layer of this name, one for each expert of a rank."""

    def __init__(
        self, count: int, *size: int, config: Any, pg_collection: Any, **given: Any
    ) -> None:
        super().__init__()
        parts, (width, height) = pg_collection.expt_tp.size(), size
        is_second = given["tp_comm_buffer_name"] == "fc2"
        shape = (height, width // parts) if is_second else (height // parts, width)
        for number in range(count):
            weight = nn.Parameter(0.1 * torch.randn(shape, dtype=config.params_dtype))
            vars(weight)["allreduce"] = config.expert_model_parallel_size == 1
            self.register_parameter(f"weight{number}", weight)

    def forward(self, rows: Tensor, counts: list[int]) -> tuple[Tensor, None]:
        parts = zip(rows.split(counts), self.parameters(), strict=True)
        return torch.cat([part @ weight.T for part, weight in parts]), None


class Local(LLMBridge):  # type: ignore[misc]
    _OTHER_MAPPING: ClassVar = {"input_layernorm.weight": [LAYER + "input_layernorm.weight"]}

    def __init__(self, config: Any, **settings: Any) -> None:
        config.rope_theta = 10_000.0  # mbridge reads the name of transformers 4
        super().__init__(config, **settings)
        self.set_extra_args(**ON_HOST)

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
        self.has_vp_stage = True
        spec = get_gpt_decoder_block_spec(
            self.config, use_transformer_engine=False, vp_stage=vp_stage
        )
        grouped = MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
        for layer in spec.layer_specs if getattr(self.hf_config, "grouped", False) else ():
            layer.submodules.mlp.submodules.experts = ModuleSpec(TEGroupedMLP, submodules=grouped)
        return spec

    def _weight_name_mapping_mcore_local_to_global(
        self, model: nn.Module, consider_ep: bool = True
    ) -> dict[str, str]:
        names = super()._weight_name_mapping_mcore_local_to_global(model, consider_ep)
        count, first = self.config.num_moe_experts, 0
        if count and consider_ep:
            first = self.mpu.ep_rank * count // self.mpu.ep_size

        def grouped(found: re.Match[str]) -> str:
            return f"experts.{found[2]}.weight{first + int(found[1])}"

        pattern = r"experts\.local_experts\.(\d+)\.(linear_fc.)\.weight"
        return {name: re.sub(pattern, grouped, there) for name, there in names.items()}


def local(bridge: Any) -> Any:
    """Return a bridge of mbridge for local layers, whose norms are modules of their own."""
    norm = {"pre_mlp_layernorm.weight": [LAYER + "post_attention_layernorm.weight"]}
    names = {"_MLP_MAPPING": bridge._MLP_MAPPING | norm}
    return type(f"Local{bridge.__name__}", (Local, bridge), names)


class LatentAttention(DotProductAttention):  # type: ignore[misc]
    """Attention that cannot be computed without Transformer Engine."""

    def __init__(self, *given: Any, **named: Any) -> None:
        channels = ("k_channels", "v_channels")
        super().__init__(*given, **{n: one for n, one in named.items() if n not in channels})


class LocalDeepseek(local(DeepseekV3Bridge)):  # type: ignore[misc]
    _ATTENTION_MAPPING = DeepseekV3Bridge._ATTENTION_MAPPING | {
        "self_attention.kv_layernorm.weight": [LAYER + "self_attn.kv_a_layernorm.weight"],
        "self_attention.q_layernorm.weight": [LAYER + "self_attn.q_a_layernorm.weight"],
    }

    @staticmethod
    def TransformerConfigClass(max_position_embeddings: int, **given: Any) -> Any:  # noqa: N802
        """As megatron-core 0.16 names its field."""
        given["original_max_position_embeddings"] = max_position_embeddings
        return MLATransformerConfig(**given)

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
        spec = super()._get_transformer_layer_spec(vp_stage)
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = LatentAttention
        return spec


LocalQwen3 = local(Qwen3Bridge)
BRIDGES: dict[str, Any] = {
    "qwen3": LocalQwen3,
    "qwen3_moe": local(Qwen3MoEBridge),
    "qwen2_moe": local(Qwen2MoEBridge),
    "llama": local(LLaMABridge),
    "deepseek_v3": LocalDeepseek,
}
