"""Tiny random checkpoints of many model families, made on the spot.

What a family is to an engine is the names, shapes and dtypes in its checkpoint, and the code that
these are loaded by: fused projections, experts, tied and padded embeddings, state spaces. Two
layers of hidden size 128 have all of that.

No weight is constant. Norms of ones and biases of zeros, as fresh models have them, look right
under any permutation, so that a test which compares them proves nothing.
"""

import atexit
import json
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from deltachain.checkpoint import WEIGHTS_FILE
from examples.demo.model import BOS, CONTEXT, EOS, PAD, VOCABULARY, make_tokenizer

_SPREAD: Final = 0.05

_IDS: Final[Mapping[str, int]] = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}

_SMALL: Final[Mapping[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    **_IDS,
}
_HEADS: Final[Mapping[str, Any]] = {"head_dim": 32}
_TIED: Final[Mapping[str, Any]] = {"tie_word_embeddings": True}
_MOE: Final[Mapping[str, Any]] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LATENT: Final[Mapping[str, Any]] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    # As real ones have it; on a CPU, SGLang makes no MLA without.
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": CONTEXT,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    **_MOE,
}


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture, small."""

    name: str
    model_type: str
    config: Mapping[str, Any] = field(hash=False)
    auto: str = "AutoModelForCausalLM"
    said: Mapping[str, Any] = field(default_factory=dict, hash=False)
    edit: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None

    def configuration(self) -> PreTrainedConfig:
        made: PreTrainedConfig = AutoConfig.for_model(self.model_type, **self.config)
        made.dtype = torch.bfloat16
        return made


def _family(name: str, model_type: str, *parts: Mapping[str, Any], **more: Any) -> Family:
    config = dict(_SMALL)
    for part in (*parts, more):
        config.update(part)
    return Family(name, model_type, MappingProxyType(config))


def _own(name: str, model_type: str, **config: Any) -> Family:
    common = {"vocab_size": VOCABULARY, **_IDS}
    return Family(name, model_type, MappingProxyType(common | config))


_ALL: Final = (
    # Dense, with fused q, k, v and gate, up in the engines.
    _family("qwen2", "qwen2"),
    _family("qwen3", "qwen3", _HEADS),
    _family("qwen3_tied", "qwen3", _HEADS, _TIED),
    # Tied, and no multiple of the 64 rows to which engines pad embeddings.
    _family("qwen3_v1000", "qwen3", _HEADS, _TIED, vocab_size=1000),
    _family("llama", "llama"),
    _family("llama_biased", "llama", attention_bias=True, mlp_bias=True),
    # One key-value head is replicated over two ranks, not split.
    _family("llama_v500", "llama", vocab_size=500, num_key_value_heads=1),
    _family("mistral", "mistral", _HEADS),
    _family("gemma", "gemma", _HEADS, _TIED),
    _family("gemma2", "gemma2", _HEADS, _TIED, query_pre_attn_scalar=32,
            hidden_act="gelu_pytorch_tanh"),  # as real checkpoints say; SGLang reads it
    _family("gemma3", "gemma3_text", _HEADS, _TIED, query_pre_attn_scalar=32, sliding_window=64),
    _family("phi3", "phi3"),
    _family("olmo2", "olmo2"),
    _family("olmo3", "olmo3"),
    _family("granite", "granite"),
    _family("cohere2", "cohere2", _TIED),
    _family("glm4", "glm4", _HEADS),
    _family("nemotron", "nemotron"),
    _family("stablelm", "stablelm"),
    _family("starcoder2", "starcoder2"),
    _family("smollm3", "smollm3"),
    _family("exaone4", "exaone4", _HEADS),
    # Dense, older: biases everywhere, projections fused or transposed in the checkpoint itself.
    _own("gpt2", "gpt2", n_embd=128, n_layer=2, n_head=4, n_positions=CONTEXT),
    _family("gpt_neox", "gpt_neox"),
    _own("falcon", "falcon", hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
         new_decoder_architecture=False, multi_query=True),
    _own("bloom", "bloom", hidden_size=128, n_layer=2, n_head=4),
    _own("opt", "opt", hidden_size=128, ffn_dim=256, num_hidden_layers=2, num_attention_heads=4,
         max_position_embeddings=CONTEXT, word_embed_proj_dim=128),
    # Mixtures of experts.
    _family("qwen2_moe", "qwen2_moe", _MOE, num_experts=4, shared_expert_intermediate_size=64),
    _family("qwen3_moe", "qwen3_moe", _HEADS, _MOE, num_experts=4),
    _family("qwen3_next", "qwen3_next", _HEADS, _MOE, num_hidden_layers=4,
            full_attention_interval=4, num_experts=4, shared_expert_intermediate_size=64,
            linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=32,
            linear_value_head_dim=32),
    _family("mixtral", "mixtral", num_local_experts=4, num_experts_per_tok=2),
    _family("phimoe", "phimoe", num_local_experts=4, num_experts_per_tok=2),
    _family("gpt_oss", "gpt_oss", _HEADS, num_local_experts=4, num_experts_per_tok=2,
            sliding_window=64),
    _family("olmoe", "olmoe", num_experts=4, num_experts_per_tok=2),
    _family("granitemoe", "granitemoe", num_local_experts=4, num_experts_per_tok=2),
    _family("deepseek_v2", "deepseek_v2", _LATENT, q_lora_rank=None, topk_method="greedy",
            scoring_func="softmax", n_group=1, topk_group=1),
    _family("deepseek_v3", "deepseek_v3", _LATENT, q_lora_rank=64, topk_method="noaux_tc",
            scoring_func="sigmoid", n_group=2, topk_group=1),
    _family("glm4_moe", "glm4_moe", _HEADS, _MOE, n_routed_experts=4, n_shared_experts=1,
            first_k_dense_replace=1, n_group=1, topk_group=1),
    _family("llama4_text", "llama4_text", _HEADS, num_local_experts=4, num_experts_per_tok=1,
            intermediate_size_mlp=256),
    # State spaces.
    _own("mamba", "mamba", hidden_size=128, state_size=16, num_hidden_layers=2),
    _own("mamba2", "mamba2", hidden_size=128, state_size=16, num_hidden_layers=2, expand=2,
         head_dim=32, num_heads=8, n_groups=1),
    _family("jamba", "jamba", num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1,
            expert_layer_period=2, expert_layer_offset=1, num_experts=4, num_experts_per_tok=2,
            mamba_d_state=16, mamba_d_conv=4, mamba_expand=2),
)  # fmt: skip

FAMILIES: Final[Mapping[str, Family]] = MappingProxyType({one.name: one for one in _ALL})


def make(family: Family | str, folder: Path) -> Path:
    """Write a checkpoint folder: ``config.json`` and bf16 safetensors, of a few MB at most."""
    wanted = named(family) if isinstance(family, str) else family
    maker = getattr(transformers, wanted.auto)
    with torch.random.fork_rng(devices=[]):  # the model draws weights of its own first
        model: PreTrainedModel = maker.from_config(wanted.configuration())
    model.bfloat16()
    with torch.no_grad():
        for name, tensor in _kept(model):
            _fill(tensor, f"{wanted.name}/{name}")
    model.save_pretrained(folder)
    if wanted.said:
        said = json.loads((folder / "config.json").read_text()) | dict(wanted.said)
        (folder / "config.json").write_text(json.dumps(said))
    if wanted.edit is not None:
        saved = load_file(folder / WEIGHTS_FILE)
        made = wanted.edit(saved)
        for name in made.keys() - saved.keys():
            if made[name].is_floating_point():
                _fill(made[name], f"{wanted.name}/{name}")
            if name.endswith(("_scale", ".scales")):
                made[name].abs_()  # engines take others for missing
        save_file(made, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    return folder


def named(family: str) -> Family:
    from tests.engines.unusual import MORE, UNUSUAL  # noqa: PLC0415 - made of what is in here

    return {**FAMILIES, **UNUSUAL, **MORE}[family]


def _fill(tensor: Tensor, key: str) -> None:
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    tensor.copy_(torch.randn(tensor.shape, generator=generator) * _SPREAD)


@cache
def checkpoint(family: str) -> Path:
    """The checkpoint folder of a family, made once a process.

    vLLM changes the classes of some families as it loads them, and nobody can make them after that.
    """
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return make(family, folder)


def with_tokenizer(folder: Path) -> Path:
    """Put the demo's byte-level tokenizer into a checkpoint folder."""
    config = json.loads((folder / "config.json").read_text())
    tokenizer = make_tokenizer()
    if config["vocab_size"] < len(tokenizer):
        raise ValueError(f"{folder}: {len(tokenizer)} tokens, {config['vocab_size']} rows")
    for key, token in (("pad_token_id", PAD), ("eos_token_id", EOS), ("bos_token_id", BOS)):
        if config.get(key) != tokenizer.convert_tokens_to_ids(token):
            raise ValueError(f"{folder}: {key} is {config.get(key)}, which is not {token}")
    tokenizer.save_pretrained(folder)
    return folder


def _kept(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    names = set(model.state_dict())
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if name in names and buffer.is_floating_point():
            yield name, buffer
