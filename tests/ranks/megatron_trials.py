"""What ranks do under megatron-core; ``make venv-trainers`` has it."""

import zlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING

import deltachain
from deltachain.integrations.megatron import shards
from deltachain.kernels.torch_kernels import bits_of
from tests.ranks.megatron_bridges import BRIDGES
from tests.ranks.transformers_trials import TINY
from tests.ranks.trials import RATE, attaches, publishes


class OnHost(TorchFunctionMode):
    """The host in the place of a card: megatron-core asks for one by name."""

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0]
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        found = func(*args, **kwargs)
        is_kind = func is Tensor.type and isinstance(found, str)
        return found.replace("torch.", "torch.cuda.") if is_kind else found


def on_host() -> OnHost:
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.mem_get_info = lambda *_: (0, 0)
    moe_utils.te_general_gemm = None  # unknown without Transformer Engine, and asked for
    for name in ("TELinear", "TEColumnParallelLinear"):
        setattr(multi_latent_attention, name, ())
    tensor_parallel.get_cuda_rng_tracker().fork = nullcontext  # of dropout, which is 0
    return OnHost()


def stepping(models: list[Any], optimizer: Any) -> Callable[[int], None]:
    """Return a function that trains a step, by its number."""

    def forward(batches: Any, model: Any) -> Any:
        tokens = next(batches)
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        losses = model(tokens, places, mask[None, None], labels=tokens)
        return losses, lambda output: (output.float().mean(), {})

    def step(number: int) -> None:
        for model in models:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        replica = parallel_state.get_data_parallel_rank()
        generator = torch.Generator().manual_seed(10 * number + replica)
        batches = torch.randint(0, 61, (len(models), 2, 8), generator=generator)
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(batches) for _ in models],
            model=models,
            num_microbatches=len(batches),
            seq_length=8,
            micro_batch_size=2,
        )
        optimizer.step()

    return step


def drawing(models: list[Any], optimizer: Any) -> Callable[[int], None]:
    """Return a function that trains by drawn gradients, where a forward pass needs a card."""

    def step(number: int) -> None:
        stage = parallel_state.get_pipeline_model_parallel_rank()
        for name, one in (named for model in models for named in model.named_parameters()):
            where = name if "embedding" in name else f"{name} {stage}"  # which two stages may share
            bits = zlib.crc32(bits_of(one.detach()).numpy().tobytes())  # equal of copies
            generator = torch.Generator().manual_seed(number + bits + zlib.crc32(where.encode()))
            one.main_grad.copy_(torch.randn(one.shape, generator=generator))
        optimizer.step()

    return step


EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": TINY["intermediate_size"] // 3,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "shared_expert_intermediate_size": 24,
}
LATENT: dict[str, Any] = {
    "vocab_size": 64,  # mbridge fills up none of this model
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
}


def megatron(rank: int, how: str, url: str, folder: str) -> None:
    """Train a model of mbridge by megatron-core, as ``qwen3_moe PP2 EP2``.

    ``KV1`` is its number of key-value heads, ``tied`` ties the head to the embedding, ``grouped``
    has the experts of Transformer Engine, ``drawn`` draws gradients.
    """
    words = how.split()
    degrees = {one[:-1]: int(one[-1]) for one in words if one[-1].isdigit()}
    with on_host():
        torch.manual_seed(rank // degrees.get("TP", 1))
        parallel_state.initialize_model_parallel(
            degrees.get("TP", 1),
            degrees.get("PP", 1),
            degrees.get("VPP"),
            expert_model_parallel_size=degrees.get("EP", 1),
            expert_tensor_parallel_size=degrees.get("ETP"),
        )
        sizes = TINY | {"vocab_size": 61, "head_dim": 8, "num_hidden_layers": 4}
        sizes |= {"num_key_value_heads": degrees.get("KV", 2)} | EXPERTS
        kind = words[0]
        if kind == "deepseek_v3":
            sizes |= LATENT
        config = CONFIG_MAPPING[kind](**sizes | {"tie_word_embeddings": "tied" in words})
        config.grouped = "grouped" in words
        bridge = BRIDGES[kind](
            config, make_vocab_size_divisible_by=None if kind == "deepseek_v3" else 16
        )
        models = bridge.get_model(
            wrap_with_ddp=True, ddp_config={"use_distributed_optimizer": True}, model_type=None
        )
        bridge.config.finalize_model_grads_func = finalize_model_grads
        optimizer = get_megatron_optimizer(
            OptimizerConfig(lr=RATE, bf16=True, use_distributed_optimizer=True), models
        )

        def export() -> dict[str, Tensor]:
            return {name: one.detach().clone() for name, one in bridge.export_weights(models)}

        step = (drawing if "drawn" in words else stepping)(models, optimizer)
        mine = shards(bridge, models)
        publishes(rank, mine, step, export, url, folder)
        attaches(rank, partial(deltachain.attach, mine, optimizer), step, export, url, folder)
