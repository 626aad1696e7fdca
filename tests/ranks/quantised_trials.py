"""Trials of ranks that quantise what they hold parts of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from deltachain.errors import ConfigError, DeltaChainError
from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.quantise.tensors import CutMessage
from deltachain.publish.ranks.collectives import Collective

DEADLINE_S = 60.0


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.wide = nn.Linear(352, 200)
        self.tall = nn.Linear(160, 410, bias=False)
        self.small = nn.Linear(64, 5, bias=False)
        with torch.no_grad():
            self.wide.weight[130:] = 0  # blocks of zeros


def mixture() -> Qwen3MoeForCausalLM:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "hidden_size": 80,
        "intermediate_size": 80,
        "moe_intermediate_size": 144,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "vocab_size": 50,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))


MODELS: Final[dict[str, Callable[[], nn.Module]]] = {"layers": Layers, "mixture": mixture}


def shard_(model: nn.Module, dim: int) -> None:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            at = min(dim, parameter.ndim - 1)
            spread = distribute_tensor(parameter.detach(), mesh, [Shard(at)], src_data_rank=None)
            setattr(module, name, nn.Parameter(spread))


def step_(model: nn.Module, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in model.parameters():
            change = torch.randn(parameter.shape, generator=generator) * 1e-4
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                change = distribute_tensor(change, mesh, placements, src_data_rank=None)
            parameter.add_(change)


def publishes(rank: int, model: str, recipe: str, dim: int, url: str, steps: int) -> None:
    del rank
    made = MODELS[model]()
    if distributed.get_world_size() > 1:
        shard_(made, dim)
    config = PublishConfig(
        url=url, quantization=recipe, dtype="BF16", when_busy="wait", deadline_s=DEADLINE_S
    )
    sent: list[int] = []
    monitored = Collective.all_gather

    def all_gather(self: Any, value: Any, kind: Any) -> Any:
        if isinstance(value, CutMessage):
            sent.append(sum(len(one.amax) for one in value.found))
        return monitored(self, value, kind)

    with pytest.MonkeyPatch.context() as patch, Publisher(config).attach(made) as publisher:
        patch.setattr(Collective, "all_gather", all_gather)
        for number in range(steps):
            step_(made, number)
            publisher.publish(step=number).result(DEADLINE_S)
    weights = sum(p.numel() for p in made.parameters())
    assert all(nbytes < weights / 20 for nbytes in sent), sent  # amax travels, not weights


def refuses(rank: int, recipe: str, url: str, spoilt: int) -> None:
    model = Layers()
    shard_(model, 0)
    config = PublishConfig(
        url=url, quantization=recipe, dtype="BF16", when_busy="wait", deadline_s=20
    )
    with Publisher(config).attach(model) as publisher:
        sharded: Any = model.wide.weight
        local: Tensor = sharded.to_local()
        kept = local.detach().clone()
        if rank == spoilt:
            with torch.no_grad():
                local[0, 7] = float("nan")
        error: BaseException | None = None
        try:
            error = publisher.publish(step=1).exception(DEADLINE_S)
        except DeltaChainError as exc:
            error = exc
        assert error is not None
        assert "'wide.weight' has values that are not finite" in str(error), error
        assert publisher.version == 0
        with torch.no_grad():
            local.copy_(kept)
        step_(model, 1)
        try:
            publisher.publish(step=2).result(DEADLINE_S)
        except (ConfigError, DeltaChainError):  # the first failure is raised once
            publisher.publish(step=3).result(DEADLINE_S)
        assert publisher.version == 1


def splits_bytes(rank: int, url: str) -> None:
    del rank
    model = nn.ModuleDict({"up": nn.Linear(32, 6, bias=False)})
    shard_(model, 1)
    config = PublishConfig(url=url, quantization="nvfp4a16", dtype="BF16", deadline_s=20)
    with pytest.raises(DeltaChainError, match=r"'up\.weight': this rank holds columns") as caught:
        Publisher(config).attach(model)
    assert "stores the codes of 2 columns in one U8 number" in str(caught.value)
