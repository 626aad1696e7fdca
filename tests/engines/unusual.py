"""Families with something that most lack: other heads, tensors that nobody loads, other senses."""

import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from tests.engines.families import FAMILIES, Family

Tensors: TypeAlias = dict[str, Tensor]

_WORDS: Final[Mapping[str, Any]] = FAMILIES["llama"].config

_MOE: Final[Mapping[str, Any]] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_SECTIONS: Final[Mapping[str, Any]] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 6, 6],
        "partial_rotary_factor": 1.0,
    }
}
_VISION: Final[Mapping[str, Any]] = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 128,
    "in_channels": 3,
}


def _family(name: str, model_type: str, auto: str = "AutoModelForCausalLM", **more: Any) -> Family:
    return Family(name, model_type, MappingProxyType({**_WORDS, **more}), auto)


def _and(
    base: str, name: str, edit: Callable[[Tensors], Tensors] | None = None, **said: Any
) -> Family:
    return replace(FAMILIES[base], name=name, edit=edit, said=MappingProxyType(said))


def _as(base: str, name: str, architecture: str, *edit: Any, **said: Any) -> Family:
    return _and(base, name, *edit, architectures=[architecture], **said)


def _seeing_more(name: str, model_type: str, **vision: Any) -> Family:
    text = {**_WORDS, "head_dim": 32, "model_type": f"{model_type}_text", **_SECTIONS}
    config = {
        "text_config": text,
        "vision_config": {**_VISION, **vision},
        "tie_word_embeddings": False,
    }
    return Family(name, model_type, MappingProxyType(config), "AutoModelForImageTextToText")


def _later(saved: Tensors) -> Tensors:
    made = dict(saved)
    for name, tensor in saved.items():
        if name.startswith("model.layers.1."):
            made[name.replace("model.layers.1.", "model.mtp_layers.0.")] = torch.empty_like(tensor)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        made[f"model.mtp_layers.0.{name}.weight"] = torch.empty(128, dtype=torch.bfloat16)
    made["model.mtp_layers.0.input_proj.weight"] = torch.empty(128, 256, dtype=torch.bfloat16)
    return made


_INTERN: Final = (
    ("model.embed_tokens.", "model.tok_embeddings."),
    ("lm_head.", "output."),
    (".self_attn.o_proj.", ".attention.wo."),
    (".mlp.gate_proj.", ".feed_forward.w1."),
    (".mlp.down_proj.", ".feed_forward.w2."),
    (".mlp.up_proj.", ".feed_forward.w3."),
    (".input_layernorm.", ".attention_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
)


def _intern(saved: Tensors) -> Tensors:
    made = {}
    for name, tensor in saved.items():
        new = name
        for before, after in _INTERN:
            new = new.replace(before, after)
        if "q_proj" in new:
            shape = (2, -1, 32, 128)
            parts = [saved[name.replace("q_proj", f"{k}_proj")].view(shape) for k in "qkv"]
            joined = torch.cat(parts, 1).reshape(-1, 128)
            made[new.replace("self_attn.q_proj", "attention.wqkv")] = joined
        elif "self_attn" not in new:
            made[new] = tensor
    return made


def _normed(saved: Tensors) -> Tensors:
    norms = [name for name in saved if "norm" in name]
    return saved | {n.replace(".weight", ".bias"): torch.empty_like(saved[n]) for n in norms}


_ALL_MORE: Final = (
    # Of another architecture.
    _as("qwen2", "mimo", "MiMoForCausalLM", _later, num_nextn_predict_layers=1),
    _as("llama", "minicpm", "MiniCPMForCausalLM", scale_emb=12, dim_model_base=64, scale_depth=1.4),
    _as("llama", "xverse", "XverseForCausalLM"),
    _as("llama", "orion", "OrionForCausalLM", _normed),
    _as("llama", "internlm2", "InternLM2ForCausalLM", _intern, bias=False),
    _as("qwen3", "sdar", "SDARForCausalLM"),
    # Heads.
    _family("qwen2_sequences", "qwen2", "AutoModelForSequenceClassification"),
    _family("qwen3_sequences", "qwen3", "AutoModelForSequenceClassification", head_dim=32),
    _family("gemma2_sequences", "gemma2", "AutoModelForSequenceClassification", head_dim=32,
            query_pre_attn_scalar=32, hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True),
    _family("qwen3_bare", "qwen3", "AutoModel", head_dim=32),
    _family("mistral_bare", "mistral", "AutoModel", head_dim=32),
    # Layers of other kinds.
    _family("granite_swa", "granite_swa"),
    _family("mellum", "mellum", head_dim=32, num_experts=4, **_MOE),
    _family("dots1", "dots1", head_dim=32, n_routed_experts=4, n_shared_experts=1,
            first_k_dense_replace=1, n_group=1, topk_group=1, **_MOE),
    _family("persimmon", "persimmon", num_key_value_heads=4),
    # Other senses.
    _seeing_more("qwen2_5_vl", "qwen2_5_vl", fullatt_block_indexes=[1], window_size=56),
    _seeing_more("glm4v", "glm4v", image_size=28),
)  # fmt: skip

MORE: Final[Mapping[str, Family]] = MappingProxyType({one.name: one for one in _ALL_MORE})


GROUP: Final = 32
"""Columns of GPTQ that have a scale in common."""

INT8: Final[Mapping[str, Any]] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel",
                        "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "int", "symmetric": True,
                                  "strategy": "token", "dynamic": True},
        }
    },
}  # fmt: skip

KEYS_AND_VALUES: Final[Mapping[str, Any]] = {
    **INT8,
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor",
                        "dynamic": False},
}  # fmt: skip

GPTQ: Final[Mapping[str, Any]] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": GROUP,
    "desc_act": False,
    "sym": True,
    "lm_head": False,
}

_LINEAR: Final = re.compile(r"^model\.layers\.\d+\..*_proj\.weight$")
_ATTENTION: Final = re.compile(r"^(model\.layers\.\d+\.self_attn)\.k_proj\.weight$")


def to_int8(saved: Tensors) -> Tensors:
    made = dict(saved)
    for name, weight in _linears(saved):
        made[name] = _random(name, weight.shape, torch.int8)
        made[f"{name}_scale"] = torch.empty(weight.shape[0], 1, dtype=torch.bfloat16)
    return made


def with_scales(saved: Tensors) -> Tensors:
    prefixes = [found[1] for name in saved if (found := _ATTENTION.match(name))]
    scales = [f"{prefix}.{kind}_scale" for prefix in prefixes for kind in "kv"]
    return to_int8(saved) | {name: torch.empty(1, dtype=torch.bfloat16) for name in scales}


def to_gptq(saved: Tensors) -> Tensors:
    made = dict(saved)
    for name, weight in _linears(saved):
        del made[name]
        rows, columns = weight.shape
        layer, groups = name.removesuffix(".weight"), columns // GROUP
        for part, shape in (("qweight", (columns // 8, rows)), ("qzeros", (groups, rows // 8))):
            made[f"{layer}.{part}"] = _random(f"{layer}.{part}", shape, torch.int32)
        made[f"{layer}.scales"] = torch.empty(groups, rows, dtype=torch.bfloat16)
        made[f"{layer}.g_idx"] = torch.arange(columns, dtype=torch.int32) // GROUP
    return made


def _linears(saved: Tensors) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, tensor) for name, tensor in saved.items() if _LINEAR.match(name))


def _random(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, shape, generator=generator, dtype=dtype)


_TEXT: Final = {**_WORDS, "head_dim": 32}
_SIGHT: Final[Mapping[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def _saying(said: Mapping[str, Any], *parts: str, **more: Any) -> Family:
    return replace(_family(*parts, **more), said=MappingProxyType(dict(said)))


def _seeing(name: str, model_type: str, text: str, sight: Mapping[str, Any], **more: Any) -> Family:
    config = {"text_config": {"model_type": text, **_TEXT}, "vision_config": dict(sight), **more}
    return Family(name, model_type, MappingProxyType(config), "AutoModelForImageTextToText")


def _wide(base: str, name: str) -> Family:
    """A family with latent attention as wide as that of real ones: kernels know no other width.

    Every token goes to all experts: of two that are as good as each other rounding chooses one, and
    the next token could be explained by no other implementation.
    """
    wide = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    family = FAMILIES[base]
    experts = family.config["n_routed_experts"]
    every = {"topk_group": family.config["n_group"], "num_experts_per_tok": experts}
    return replace(family, name=name, config=MappingProxyType({**family.config, **wide, **every}))


def _layer_again(saved: Tensors, last: int, prefix: str, **more: tuple[int, ...]) -> Tensors:
    own = re.compile(rf"^model\.layers\.{last}\.")
    made = dict(saved)
    for name, tensor in saved.items():
        if own.match(name):
            made[own.sub(prefix, name)] = torch.empty_like(tensor)
    for name, shape in more.items():
        made[prefix + name.replace("__", ".")] = torch.empty(shape, dtype=torch.bfloat16)
    return made


def _mtp(saved: Tensors) -> Tensors:
    return _layer_again(
        saved,
        1,
        "model.layers.2.",
        enorm__weight=(128,),
        hnorm__weight=(128,),
        eh_proj__weight=(128, 256),
        shared_head__norm__weight=(128,),
        shared_head__head__weight=tuple(saved["lm_head.weight"].shape),
        embed_tokens__weight=tuple(saved["model.embed_tokens.weight"].shape),
    )


def _mtp_of_qwen(saved: Tensors) -> Tensors:
    shapes = {"fc": (128, 256), "norm": (128,)}
    shapes |= {f"pre_fc_norm_{kind}": (128,) for kind in ("embedding", "hidden")}
    made = _layer_again(saved, 3, "mtp.layers.0.")
    return made | {
        f"mtp.{name}.weight": torch.empty(shape, dtype=torch.bfloat16)
        for name, shape in shapes.items()
    }


def _inv_freq(saved: Tensors) -> Tensors:
    names = [f"model.layers.{n}.self_attn.rotary_emb.inv_freq" for n in range(2)]
    return saved | {name: torch.empty(16, dtype=torch.float32) for name in names}


def _of_clip(saved: Tensors) -> Tensors:
    part = re.compile(r"(vision_tower\.)(?!vision_model\.)")
    return {part.sub(r"\1vision_model.", name): tensor for name, tensor in saved.items()}


def _untied(saved: Tensors) -> Tensors:
    return saved | {"lm_head.weight": torch.empty_like(saved["model.embed_tokens.weight"])}


_QWEN3_5: Final = _family(
    "qwen3_5", "qwen3_5_text", head_dim=32, num_hidden_layers=4,
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=32,
    linear_value_head_dim=32,
)  # fmt: skip

_ALL: Final = (
    # Heads.
    _family("qwen3_tokens", "qwen3", "AutoModelForTokenClassification", head_dim=32),
    _family("qwen2_tokens", "qwen2", "AutoModelForTokenClassification"),
    _family("llama_sequences", "llama", "AutoModelForSequenceClassification"),
    _family("modernbert", "modernbert", "AutoModelForSequenceClassification"),
    _family("phi", "phi", num_key_value_heads=4),
    Family("whisper", "whisper", MappingProxyType({
        "vocab_size": 512, "d_model": 128, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 256,
        "decoder_ffn_dim": 256, "max_source_positions": 64, "max_target_positions": 128,
        "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1, "decoder_start_token_id": 2,
    }), "AutoModelForSpeechSeq2Seq"),
    # Served on CPUs.
    _wide("deepseek_v3", "deepseek_v3_wide"),
    # Tensors that nobody loads.
    _and("deepseek_v3", "deepseek_v3_mtp", _mtp, num_nextn_predict_layers=1),
    _and("glm4_moe", "glm4_moe_mtp", _mtp, num_nextn_predict_layers=1),
    _and("llama", "llama_inv_freq", _inv_freq),
    _and("llama", "llama_kv_scales", with_scales, quantization_config=KEYS_AND_VALUES),
    _and("llama", "llama_int8", to_int8, quantization_config=INT8),
    _and("llama", "llama_gptq", to_gptq, quantization_config=GPTQ),
    _and("gemma", "gemma_untied", _untied),
    _and("cohere2", "cohere2_untied", _untied),
    # Constants of the engine.
    _family("gemma3n", "gemma3n_text", head_dim=32, num_hidden_layers=5, num_kv_shared_layers=2,
            layer_types=["sliding_attention", "sliding_attention", "full_attention",
                         "sliding_attention", "full_attention"],
            hidden_size_per_layer_input=32, vocab_size_per_layer_input=512,
            laurel_rank=16, altup_num_inputs=2, intermediate_size=[256] * 5,
            activation_sparsity_pattern=[0.0] * 5, tie_word_embeddings=True),
    _family("gemma4", "gemma4_text", head_dim=32, tie_word_embeddings=True, global_head_dim=32,
            hidden_size_per_layer_input=32, vocab_size_per_layer_input=512),
    _family("falcon_h1", "falcon_h1", head_dim=32, mamba_d_ssm=256, mamba_n_heads=8,
            mamba_d_head=32, mamba_n_groups=1, mamba_d_state=16, mamba_expand=2),
    _family("minicpm3", "minicpm3", num_key_value_heads=4, q_lora_rank=64, kv_lora_rank=64,
            qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32),
    # Other senses.
    replace(
        _seeing("llava", "llava", "llama", {"model_type": "clip_vision_model", **_SIGHT},
                image_token_index=5),
        edit=_of_clip,
    ),
    _seeing("mistral3", "mistral3", "mistral", {"model_type": "pixtral", **_SIGHT, "head_dim": 32},
            image_token_index=5),
    replace(
        _seeing("gemma3_seeing", "gemma3", "gemma3_text",
                {"model_type": "siglip_vision_model", **_SIGHT},
                image_token_index=5, mm_tokens_per_image=4),
        edit=_of_clip,
    ),
    _seeing("idefics3", "idefics3", "llama", {"model_type": "idefics3_vision", **_SIGHT},
            scale_factor=2, image_token_id=5),
    _seeing("internvl", "internvl", "qwen2", {"model_type": "internvl_vision", **_SIGHT},
            image_token_id=5),
    # No table of this project has named these before.
    _family("arcee", "arcee"),
    _family("apertus", "apertus"),
    _family("cohere", "cohere", tie_word_embeddings=True),
    _family("cwm", "cwm", head_dim=32),
    _family("ernie4_5", "ernie4_5", head_dim=32),
    _family("ernie4_5_moe", "ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_num_shared_experts=1,
            moe_intermediate_size=64, moe_layer_start_index=1),
    _family("exaone_moe", "exaone_moe", head_dim=32, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=64, first_k_dense_replace=1, num_shared_experts=1, n_group=1,
            topk_group=1),
    _family("falcon_mamba", "falcon_mamba", state_size=16),
    _family("flex_olmo", "flex_olmo", num_experts=4, num_experts_per_tok=2),
    _family("glm", "glm", head_dim=32),
    _saying({"first_k_dense_replace": 1}, "glm4_moe_lite", "glm4_moe_lite",
            num_key_value_heads=4, q_lora_rank=64, kv_lora_rank=64,
            qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32,
            n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
            moe_intermediate_size=64, n_group=1, topk_group=1),
    _family("gpt_bigcode", "gpt_bigcode", n_embd=128, n_layer=2, n_head=4, n_positions=256),
    _family("gptj", "gptj", n_embd=128, n_layer=2, n_head=4, rotary_dim=16, n_positions=256),
    _family("granitemoeshared", "granitemoeshared", num_local_experts=4, num_experts_per_tok=2,
            shared_intermediate_size=64),
    _family("granitemoehybrid", "granitemoehybrid", num_local_experts=4, num_experts_per_tok=2,
            shared_intermediate_size=64, layer_types=["mamba", "attention"], mamba_n_heads=8,
            mamba_d_head=32, mamba_d_state=16, mamba_n_groups=1),
    _family("hunyuan_dense", "hunyuan_v1_dense", head_dim=32),
    _saying({"conv_dim": 128, "block_dim": 128}, "lfm2", "lfm2", block_auto_adjust_ff_dim=False,
            layer_types=["conv", "full_attention"]),
    _family("lfm2_moe", "lfm2_moe", layer_types=["conv", "full_attention"], num_experts=4,
            num_experts_per_tok=2, moe_intermediate_size=64, num_dense_layers=1),
    _saying({"rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True}, "minimax_m2",
            "minimax_m2", head_dim=32, num_local_experts=4, num_experts_per_tok=2),
    _family("ministral3", "ministral3", head_dim=32),
    _family("olmo", "olmo"),
    _family("olmo_hybrid", "olmo_hybrid", num_hidden_layers=4),
    _family("seed_oss", "seed_oss", head_dim=32),
    _family("vaultgemma", "vaultgemma", head_dim=32, tie_word_embeddings=True),
    _family("zamba2", "zamba2", num_hidden_layers=3, layers_block_type=["mamba", "mamba", "hybrid"],
            num_mem_blocks=1, mamba_d_state=16, n_mamba_heads=8, mamba_headdim=32, mamba_ngroups=1,
            num_key_value_heads=4),
    _family("roberta", "roberta", "AutoModelForSequenceClassification"),
    _family("bert", "bert", "AutoModelForSequenceClassification"),
    _family("jais2", "jais2", head_dim=32),
    _saying({"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1}, "afmoe",
            "afmoe", head_dim=32, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=64, num_dense_layers=1),
    _family("solar_open", "solar_open", head_dim=32, n_routed_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=64),
    _QWEN3_5,
    replace(_QWEN3_5, name="qwen3_5_mtp", edit=_mtp_of_qwen),
)  # fmt: skip

UNUSUAL: Final[Mapping[str, Family]] = MappingProxyType({one.name: one for one in _ALL})
