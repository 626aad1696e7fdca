"""Families that SGLang has code of its own for, and that no other table names.

Where transformers has none of an architecture, a checkpoint of a near one is said to be of it: what
the engine sees are names, shapes and a configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


def _as(
    base: str,
    name: str,
    architecture: str,
    edit: Callable[[Tensors], Tensors] | None = None,
    **said: Any,
) -> Family:
    said = {"architectures": [architecture], **said}
    return replace(FAMILIES[base], name=name, edit=edit, said=MappingProxyType(said))


def _seeing(name: str, model_type: str, **vision: Any) -> Family:
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


_ALL: Final = (
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
    _family("laguna", "laguna", head_dim=32, num_experts=4, **_MOE),
    # Other senses.
    _seeing("qwen2_5_vl", "qwen2_5_vl", fullatt_block_indexes=[1], window_size=56),
    _seeing("glm4v", "glm4v", image_size=28),
    _seeing("glm_ocr", "glm_ocr", image_size=28),
)  # fmt: skip

MORE: Final[Mapping[str, Family]] = MappingProxyType({one.name: one for one in _ALL})
