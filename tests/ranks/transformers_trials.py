"""Trials with models and trainers of transformers, which take seconds to import."""

import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import Tensor, distributed
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
)

import deltachain
from deltachain.checkpoint import Checkpoint
from deltachain.cli.pull import pull
from deltachain.kernels.torch_kernels import bits_of
from deltachain.publish import PublishConfig, Publisher
from tests.ranks.trials import RATE, compare, whole

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def _model() -> Any:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**TINY, head_dim=8))


def trainer_with_copies(rank: int, url: str, folder: str) -> None:
    _say_where(rank)
    model = _model()
    tokens = torch.randint(0, 60, (16, 12), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = TrainingArguments(
        output_dir=f"{folder}/out-{rank}",
        use_cpu=True,
        max_steps=4,
        per_device_train_batch_size=2,
        learning_rate=RATE,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    callback = deltachain.attach(trainer, url=url, dtype="BF16", when_busy="wait")
    trainer.train()
    assert [receipt.step for receipt in callback.receipts] == [1, 2, 3, 4]
    _compare(rank, model, url, folder)


def accelerate_with_shards(rank: int, url: str, folder: str) -> None:
    _say_where(rank)
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision="bf16")
    state = AcceleratorState()  # on CPUs it leaves FSDP out without a word
    state._shared_state["distributed_type"] = DistributedType.FSDP
    state._shared_state["fsdp_plugin"] = plugin
    plugin.set_mixed_precision("bf16")
    model = _model().bfloat16()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=RATE)
    model, optimizer = accelerator.prepare(model, optimizer)
    attachment = deltachain.attach(model, optimizer, url=url, dtype="BF16", when_busy="wait")
    tokens = torch.randint(0, 60, (2, 12), generator=torch.Generator().manual_seed(rank))
    for _ in range(4):
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()
    attachment.detach()
    assert attachment.publisher.version == 4
    _compare(rank, model, url, folder)


def _say_where(rank: int) -> None:
    ranks = distributed.get_world_size()
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(number) for name, number in where.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # the group is there already


def _compare(rank: int, model: Any, url: str, folder: str) -> None:
    full = whole(model)
    if rank == 0:
        pull(url, out=Path(folder) / "pulled")
        compare(Path(folder) / "pulled", full)


CONVERTED: dict[str, dict[str, Any]] = {
    # fused experts, which the checkpoint has one by one
    "qwen3_moe": {
        **TINY,
        "moe_intermediate_size": 16,
        "num_experts": 3,
        "num_experts_per_tok": 2,
    },
    # projections that the checkpoint has in one tensor
    "hrm_text": {
        **TINY,
        "num_hidden_layers": 8,
        "num_layers_per_stack": 1,
        "head_dim": 8,
    },
    # an image model, whose text model has other names in the checkpoint
    "llava": {
        "text_config": {"model_type": "llama", **TINY},
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 8,
            "patch_size": 4,
            "projection_dim": 8,
        },
        "image_token_index": 63,
    },
    # fused experts whose gate and up alternate in the checkpoint
    "inkling2_text": {
        **TINY,
        "unpadded_vocab_size": 64,
        "head_dim": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "sliding_window_size": 16,
        "d_rel": 4,
        "rel_extent": 16,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "eos_token_id": 1,
    },
}
"""Models of transformers whose checkpoint has other tensors than the model."""


def converted(rank: int, kind: str, url: str, folder: str) -> None:
    torch.manual_seed(0)
    kind, _, flat = kind.partition(" ")
    config = CONFIG_MAPPING[kind](**CONVERTED[kind])
    maker: Any = AutoModelForImageTextToText if kind == "llava" else AutoModelForCausalLM
    model: Any = maker.from_config(config, dtype=torch.float32)
    layers = [m for m in model.modules() if type(m).__name__.endswith("DecoderLayer")]
    assert layers
    if flat == "FSDP1":
        policy = ModuleWrapPolicy({type(layer) for layer in layers})
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )
    else:
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, foreach=False)
    settings = PublishConfig(url=url, dtype="BF16", when_busy="wait", deadline_s=60)
    tokens = torch.randint(0, 60, (2, 12), generator=torch.Generator().manual_seed(1))
    with Publisher(settings).attach(model) as publisher:
        for number in range(10):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            publisher.publish(step=number)
    full = {name: _on_wire(tensor) for name, tensor in whole(model).items()}
    if rank:
        return
    pulled = Path(folder) / "pulled"
    pull(url, out=pulled)
    gathered: Any = maker.from_config(config, dtype=torch.bfloat16)
    lacking = gathered.load_state_dict(full, strict=False)
    assert not lacking.unexpected_keys
    gathered.save_pretrained(Path(folder) / "saved")
    names = [set(Checkpoint(Path(folder) / name).specs) for name in ("saved", "pulled")]
    assert names[0] == names[1], names[0] ^ names[1]
    saved, loaded = (
        maker.from_pretrained(Path(folder) / name, dtype=torch.bfloat16)
        for name in ("saved", "pulled")
    )
    state = loaded.state_dict()
    for name, tensor in saved.state_dict().items():
        assert torch.equal(bits_of(state[name]), bits_of(tensor)), name
    with torch.no_grad():
        assert torch.equal(saved(tokens).logits, loaded(tokens).logits)


def _on_wire(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
