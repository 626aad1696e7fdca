"""Trials of ranks whose settings differ, or that open different stores under one URL."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from typing_extensions import override

import deltachain
from deltachain.chain.trust import SigningKey
from deltachain.control.announce import Wait
from deltachain.errors import ConfigError, DeltaChainError
from deltachain.integrations.trl import DeltaChainWeightTransfer
from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.quantise.tensors import CutMessage
from deltachain.publish.ranks.collectives import Collective
from deltachain.store import open_store
from tests.ranks.trials import LAYOUTS, check, set_up, train_step
from tests.support.faults import FaultyStore

LAYOUT = "rows"
HUB_VERSIONS = 4


def publishes_to_hub(rank: int, url: str, endpoint: str, token: str) -> None:
    model, optimizer = set_up(LAYOUT)
    options = {"endpoint": endpoint, "token": token}
    config = PublishConfig(
        url=url, dtype="BF16", deadline_s=60, storage_options=options, anchor_every=2
    )
    with Publisher(config).attach(model) as publisher:
        attached = publisher._store.requests
        for number in range(HUB_VERSIONS):
            train_step(LAYOUT, model, optimizer, number)
            assert publisher.publish(step=number).result(60).step == number
    made = publisher._store.requests - attached
    assert made >= 3 * HUB_VERSIONS if rank == 0 else made <= 1  # another token of the storage


OLD_KEY = SigningKey.of(b"\2" * 32)


def publishes_signed(rank: int, key: str, url: str, first: int) -> None:
    os.environ["DELTACHAIN_TRUSTED_KEYS"] = str(OLD_KEY.public)
    model, optimizer = set_up(LAYOUT)
    for number in range(first):
        train_step(LAYOUT, model, optimizer, number)
    file = None if rank else Path(key)
    config = PublishConfig(url=url, dtype="BF16", deadline_s=60, signing_key=file)
    with Publisher(config).attach(model) as publisher:
        train_step(LAYOUT, model, optimizer, first)
        assert publisher.publish(step=first).result(60).step == first


SYNCS = 3


def syncs(rank: int, url: str, folder: str, wait: Wait) -> None:
    model, optimizer = set_up("rows")
    trainer: Any = SimpleNamespace(
        model=model,
        accelerator=SimpleNamespace(unwrap_model=lambda it: it, num_processes=2),
        callback_handler=SimpleNamespace(callbacks=[]),
        rollout_worker=SimpleNamespace(metrics_queue=Queue()),
        _streaming_iter=lambda: iter([pytest.fail("gathers")]),
    )
    args, state, control = Mock(weight_sync_steps=1), Mock(), Mock()
    transfer = DeltaChainWeightTransfer(url, wait=wait, dtype="BF16", when_busy="wait")
    transfer.attach(trainer)
    for step in range(SYNCS + 1):
        if step:
            train_step("rows", model, optimizer, step)
        state.global_step = step
        with CommDebugMode() as communication:
            (transfer.on_step_end if step else transfer.on_train_begin)(args, state, control)
            if rank == 0:
                transfer.send_weights(trainer._streaming_iter())
            else:
                for _ in trainer._streaming_iter():
                    raise AssertionError("there is nothing to gather")
        assert communication.get_total_counts() == 0
        distributed.barrier()
        if wait == "all":
            assert rank or transfer.version == step  # the others hear of it a little later
            check(rank, step, model, url, folder)
    if rank == 0:  # as TRL does
        transfer.destroy()
    distributed.barrier()
    check(rank, SYNCS, model, url, f"{folder}/last")


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


def publishes_quantised(rank: int, model: str, recipe: str, dim: int, url: str, steps: int) -> None:
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


def refuses_quantised(rank: int, recipe: str, url: str, spoilt: int) -> None:
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


DEADLINE_S = 60.0


def refuses(
    rank: int, url: str, settings: Sequence[Mapping[str, Any]], said: Sequence[str]
) -> None:
    model = Layers()
    shard_(model, 0)
    config = PublishConfig(
        **{"url": url, "dtype": "BF16", "deadline_s": DEADLINE_S, **settings[rank]}
    )
    with pytest.raises(ConfigError, match="the ranks have different settings") as caught:
        Publisher(config).attach(model)
    for text in said:
        assert text in str(caught.value), str(caught.value)
    assert "every rank" in caught.value.hint


def refuses_steps(rank: int, url: str) -> None:
    model, optimizer = set_up("rows")
    with pytest.raises(ConfigError, match="every_steps is 1 on rank 0, 2 on rank 1"):
        deltachain.attach(model, optimizer, url=url, every_steps=rank + 1, dtype="BF16")


def publishes(rank: int, url: str, quantization: str | None) -> None:
    del rank
    model = Layers()
    shard_(model, 0)
    config = PublishConfig(url=url, dtype="BF16", quantization=quantization, deadline_s=DEADLINE_S)
    with Publisher(config).attach(model) as publisher:
        step_(model, 1)
        publisher.publish(step=1).result(DEADLINE_S)


def publishes_with(rank: int, url: str, settings: Sequence[Mapping[str, Any]]) -> None:
    model, optimizer = set_up("rows")
    config = PublishConfig(url=url, dtype="BF16", deadline_s=DEADLINE_S, **settings[rank])
    with Publisher(config).attach(model) as publisher:
        for number in range(3):
            train_step("rows", model, optimizer, number)
            assert publisher.publish(step=number).result(DEADLINE_S).version == number + 1


class StoreOfAnotherHost(FaultyStore):
    shown = ""

    @property
    @override
    def url(self) -> str:
        return self.shown


def opens_another_store(rank: int, folder: str, message: str) -> None:
    store = StoreOfAnotherHost(open_store(Path(folder) / str(rank), writer=True))
    store.shown = (Path(folder) / "0").as_uri()
    config = PublishConfig(url=store.shown, dtype="BF16", deadline_s=DEADLINE_S)
    with pytest.raises(DeltaChainError, match=message) as caught:
        Publisher(config, store=store).attach(LAYOUTS["rows"]())
    assert "same store" in caught.value.hint
