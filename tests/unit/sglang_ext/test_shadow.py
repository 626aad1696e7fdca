"""Layers loaded apart in SGLang's second model, which is a fake one here."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deltachain_sglang import loading
from deltachain_sglang.model import SglangModel, Shadow

SHAPE = (4, 6)


class Fp8Method:
    """Quantises a layer after loading, as SGLang's method for online quantisation does."""

    def process_weights_after_loading(self, layer: Any) -> None:
        raw = layer.weight.data.float()
        scale = raw.abs().amax(1, keepdim=True) / 448
        layer.weight = nn.Parameter((raw / scale).to(torch.float8_e4m3fn), requires_grad=False)
        layer.weight_scale = nn.Parameter(scale, requires_grad=False)
        layer.largest = float(raw.abs().max())


class UnquantizedMethod:
    """Leaves a layer as it is."""

    def process_weights_after_loading(self, layer: Any) -> None:
        del layer


class Model(nn.Module):
    """Two layers, one of which is quantised."""

    def __init__(self) -> None:
        super().__init__()
        for name, method in (("coded", Fp8Method()), ("plain", UnquantizedMethod())):
            layer: Any = nn.Module()
            layer.weight = nn.Parameter(torch.zeros(SHAPE).bfloat16(), requires_grad=False)
            layer.quant_method = method
            self.add_module(name, layer)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> SglangModel:
    """A model that SGLang loaded, as far as nothing of SGLang is needed."""

    def load(model: nn.Module, tensors: Iterable[tuple[str, Tensor]], _: object) -> None:
        for name, tensor in tensors:
            model.get_parameter(name).data.copy_(tensor)

    def acting(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, Any]]:
        return [(m, m.quant_method) for m in modules if hasattr(m, "quant_method")]

    def process(modules: Iterable[nn.Module], _: object) -> None:
        for module, method in acting(modules):
            method.process_weights_after_loading(module)

    monkeypatch.setattr(loading, "in_dtype", lambda _: nullcontext())
    monkeypatch.setattr(loading, "load", load)
    monkeypatch.setattr(loading, "acting", acting)
    monkeypatch.setattr(loading, "process", process)
    live = Model()
    load(live, weights(0), None)
    process(live.modules(), None)
    with torch.device("meta"):
        raw = Model()
    made = object.__new__(SglangModel)
    device = torch.device("cpu")
    vars(made).update(
        model=live,
        _config=SimpleNamespace(dtype=torch.bfloat16),
        _device=device,
        _known={},
        _shadow=Shadow(raw, live, torch.bfloat16, device),
    )
    return made


def weights(seed: int) -> list[tuple[str, Tensor]]:
    torch.manual_seed(seed)
    return [(f"{n}.weight", torch.randn(SHAPE).bfloat16()) for n in ("coded", "plain")]


def test_a_quantised_layer_is_loaded_apart(engine: SglangModel) -> None:
    before = {name: tensor.clone() for name, tensor in engine.tensors().items()}
    with engine.loaded_apart(frozenset({"coded"}), weights(1)[:1]) as found:
        assert set(found) == {"coded"}
        fresh: Any = found["coded"]
        live: Any = engine.modules()["coded"]
        other: Any = Model().get_submodule("coded")
        other.weight.data.copy_(weights(1)[0][1])
        Fp8Method().process_weights_after_loading(other)
        assert torch.equal(fresh.weight.data.view(torch.uint8), other.weight.data.view(torch.uint8))
        assert torch.equal(fresh.weight_scale, other.weight_scale)
        assert fresh.largest == other.largest != live.largest
    now = engine.tensors()
    assert now.keys() == before.keys()
    assert all(torch.equal(now[n].view(torch.uint8), before[n].view(torch.uint8)) for n in before)
    with engine.loaded_apart(frozenset({"coded"}), weights(2)[:1]) as again:
        assert again["coded"].get_parameter("weight_scale").numel()


def test_layers_that_are_not_quantised_are_not_loaded(
    engine: SglangModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(loading, "load")
    with engine.loaded_apart(frozenset({"plain"}), weights(1)[1:]) as found:
        assert found == {}
