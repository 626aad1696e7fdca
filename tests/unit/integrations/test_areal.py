"""Weight updates of AReaL without its package: what an engine has that a mixin uses is given."""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from deltachain import errors
from deltachain.publish import Publisher
from deltachain.subscribe import Subscriber
from examples.demo.online.processes import free_port
from tests.support.values import present


class TrainEngine:  # of areal 1.0.4
    cpu_group = None

    def __init__(self) -> None:
        self.model, self.config = nn.Linear(3, 2), SimpleNamespace(dtype="bfloat16")
        self.own: list[Any] = []

    def connect_engine(self, engine: Any, meta: Any) -> None:
        self.own.append((engine, meta.type))

    def update_weights(self, meta: Any) -> None:
        self.own.append(meta)

    def destroy(self) -> None:
        del self.model


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    module = ModuleType("areal.api")
    vars(module)["TrainEngine"] = TrainEngine
    monkeypatch.setitem(sys.modules, "areal", ModuleType("areal"))
    monkeypatch.setitem(sys.modules, "areal.api", module)
    publishing = importlib.import_module("deltachain.integrations.areal").publishing
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    made = publishing(TrainEngine, str(tmp_path / "chain"), deadline_s=0.2)()
    yield made
    made.destroy()
    distributed.destroy_process_group()
    monkeypatch.delitem(sys.modules, "deltachain.integrations.areal")


@dataclass
class Meta:
    type: str
    use_lora: bool = False


def meta(version: int, *, lora: bool = False) -> Any:
    return SimpleNamespace(version=version, use_lora=lora)


def test_an_update_that_no_server_takes_is_raised_and_stays_committed(
    engine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(errors.ConfigError, match="no server"):
        engine.update_weights(meta(1))
    for given, expected in ((f"127.0.0.1:{free_port()}", "0 of 1"), ("a:1,a:1", "twice")):
        monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", given)
        nn.init.normal_(engine.model.weight)
        with pytest.raises(errors.ControlPlaneError, match=expected):
            engine.update_weights(meta(7))
    held = {name: torch.zeros_like(one).bfloat16() for name, one in engine.model.named_parameters()}
    with Subscriber(str(tmp_path / "chain"), held) as subscriber:
        assert present(subscriber.update()).version == 2
        assert present(subscriber.last).step == 7
    assert torch.equal(held["weight"], engine.model.weight.bfloat16())
    engine.update_weights(meta(8, lora=True))
    assert [one.version for one in engine.own] == [8]


def test_no_group_of_nccl_is_made_with_servers_that_follow(engine: Any) -> None:
    for mode in ("xccl", "disk"):
        engine.connect_engine("rollout", Meta(mode))
    engine.connect_engine("rollout", Meta("xccl", use_lora=True))
    assert engine.own == [("rollout", "disk")] * 2 + [("rollout", "xccl")]


def test_an_update_attaches_anew_after_one_that_could_not(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach, down = Publisher.attach, [errors.StoreUnavailableError("the store is down")]

    def attached(publisher: Publisher, model: nn.Module) -> Publisher:
        if down:
            raise down.pop()
        return attach(publisher, model)

    monkeypatch.setattr(Publisher, "attach", attached)
    monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", f"127.0.0.1:{free_port()}")
    with pytest.raises(errors.StoreUnavailableError, match="down"):
        engine.update_weights(meta(1))
    with pytest.raises(errors.ControlPlaneError, match="version 1 on 0 of 1"):
        engine.update_weights(meta(1))
