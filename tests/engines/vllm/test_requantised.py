"""Layers of eight bits are compared with a fresh load after each swap, in a real vLLM."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest
import torch

from deltachain.errors import PartialApplyError
from tests.engines.compare import differences
from tests.engines.vllm.served import Served, fresh, served

pytestmark = pytest.mark.engine

ONLINE: Final = "vllm.model_executor.layers.quantization.online.fp8"
KERNEL: Final = "vllm.model_executor.kernels.linear.scaled_mm.cpu"
COMPRESSED: Final = "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors"
WRONG: Final = "model.layers.1.mlp.down_proj"


Process: TypeAlias = Callable[[Any, Any], None]


def layer_of(here: Served) -> Any:
    return here.model.get_submodule(WRONG)


def stale_scale(process: Process, here: Served) -> Process:
    wrong, old = layer_of(here), layer_of(here).weight_scale.detach().clone()

    def keep(method: Any, layer: Any) -> None:
        process(method, layer)
        if layer is wrong:
            layer.weight_scale.data.copy_(old)

    return keep


def stale_row(process: Process, here: Served) -> Process:
    wrong, old = layer_of(here), layer_of(here).weight.detach()[:, 3].clone()

    def keep(method: Any, layer: Any) -> None:
        process(method, layer)
        if layer is wrong:
            layer.weight.data[:, 3] = old

    return keep


def packed_with_stale_scale(process: Process, here: Served) -> Process:
    wrong, old = layer_of(here), layer_of(here).weight_scale.detach().clone()

    def keep(kernel: Any, layer: Any) -> None:
        if layer is wrong:
            layer.weight_scale.data.copy_(old)
        process(kernel, layer)

    return keep


def packed_with_stale_row(process: Process, here: Served) -> Process:
    """A packing with the codes of one row as they were: nobody can read them afterwards."""
    codes = here.before.bits(f"{WRONG}.weight").reshape(here.before.specs[f"{WRONG}.weight"].shape)
    wrong, old = layer_of(here), codes[3].copy()

    def keep(kernel: Any, layer: Any) -> None:
        if layer is wrong:
            layer.weight.data[3] = torch.from_numpy(old).view(torch.int8)
        process(kernel, layer)

    return keep


@pytest.mark.parametrize("stale", [stale_scale, stale_row])
def test_wrong_codes_or_scales_of_online_quantisation_are_refused(
    stale: Callable[[Process, Served], Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = import_module(ONLINE).Fp8PtpcOnlineLinearMethod
    with served("llama", tmp_path, quantization="fp8_per_channel") as here:
        refused_once(here, method, stale, monkeypatch)
        now = here.everything()
    assert differences(fresh(here.after, quantization="fp8_per_channel"), now) == []


@pytest.mark.parametrize("stale", [packed_with_stale_scale, packed_with_stale_row])
def test_wrong_codes_or_scales_of_the_checkpoint_are_refused(
    stale: Callable[[Process, Served], Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = import_module(KERNEL).CPUInt8ScaledMMLinearKernel
    with served("llama_int8", tmp_path) as here:
        assert layer_of(here).weight is None, "its codes are where only a kernel reads them"
        assert {len(group.layers) for _, group in here.rank._attached.groups} == {1}
        refused_once(here, kernel, stale, monkeypatch)
        now = here.everything()
    assert differences(fresh(here.after), now) == []


def refused_once(
    here: Served,
    method: Any,
    stale: Callable[[Process, Served], Process],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = here.everything()
    with monkeypatch.context() as patched:
        process = stale(method.process_weights_after_loading, here)
        patched.setattr(method, "process_weights_after_loading", process)
        with pytest.raises(PartialApplyError, match=f"{WRONG} is not what a fresh load"):
            here.rank.swap(1, 1, back=False)
    assert differences(before, here.everything()) == []
    here.rank.swap(1, 1, back=False)
    assert differences(before, here.everything())
