"""Layers of eight bits are compared with a fresh load after each swap, in a real vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest
import torch
from torch import Tensor, nn

from deltachain.checkpoint import Checkpoint
from deltachain.errors import PartialApplyError
from deltachain.replica.layout.members import numbers_in
from deltachain.replica.rank import Rank
from deltachain.testing.spools import spool_of
from tests.engines.compare import copied, differences, live
from tests.engines.families import checkpoint
from tests.engines.matrix import Change, attached, changed
from tests.engines.vllm.fresh import known, load_in_context

pytestmark = pytest.mark.engine

ONLINE: Final = "vllm.model_executor.layers.quantization.online.fp8"
KERNEL: Final = "vllm.model_executor.kernels.linear.scaled_mm.cpu"
COMPRESSED: Final = "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors"
WRONG: Final = "model.layers.1.mlp.down_proj"
"""The layer that is requantised wrongly."""


@dataclass(frozen=True, slots=True)
class Served:
    """A rank of vLLM that serves one checkpoint, and has staged another."""

    rank: Rank
    engine: Any
    model: nn.Module
    before: Checkpoint
    after: Path

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight of the layer that is requantised wrongly."""
        return self.before.specs[f"{WRONG}.weight"].shape

    @property
    def layer(self) -> Any:
        """The layer that is requantised wrongly."""
        return self.model.get_submodule(WRONG)

    def everything(self) -> dict[str, Tensor]:
        """What the model has, and what its layers compute."""
        return everything(self.engine, self.model)


def everything(engine: Any, model: nn.Module) -> dict[str, Tensor]:
    """Every tensor and every number of a model, and what its layers compute."""
    found = copied(live(model))
    for name, module in model.named_modules():
        found |= {f"{name}.{key}": torch.tensor(one) for key, one in numbers_in(module)}
    outputs = engine.compute(frozenset(engine.modules()))
    return found | {f"{name}()": output for name, output in copied(outputs).items()}


@contextmanager
def served(family: str, scratch: Path, **arguments: Any) -> Iterator[Served]:
    """Attach to a checkpoint, and stage one with other bits in every tensor."""
    before = checkpoint(family)
    specs = dict(Checkpoint(before).specs)
    with load_in_context(before, plain_linears=False, **arguments) as (config, model):
        engine = known(config, model)
        rank = Rank(engine, specs.values(), {})
        agreement = attached(rank, specs, 0, 1)
        assert not agreement.refused
        assert not [why for why in agreement.reasons.values() if "is not compared" in why]
        after = changed(specs, agreement, before, scratch / "after")
        deltas = Change(specs, agreement, before, after).deltas()
        spool = spool_of(scratch / "spool", deltas)
        rank.stage(1, spool.folder, 1 << 30)
        yield Served(rank, engine, model, Checkpoint(before), after)


def fresh(folder: Path, **arguments: Any) -> dict[str, Tensor]:
    """What a fresh load of a checkpoint has and computes."""
    with load_in_context(folder, plain_linears=False, **arguments) as (config, model):
        return everything(known(config, model), model)


Process: TypeAlias = Callable[[Any, Any], None]
"""Post-load processing of a layer, by its method."""


def stale_scale(process: Process, served: Served) -> Process:
    """A requantisation that leaves the scales of one layer as they were."""
    wrong, old = served.layer, served.layer.weight_scale.detach().clone()

    def keep(method: Any, layer: Any) -> None:
        process(method, layer)
        if layer is wrong:
            layer.weight_scale.data.copy_(old)

    return keep


def stale_row(process: Process, served: Served) -> Process:
    """A requantisation that leaves the codes of one row as they were."""
    wrong, old = served.layer, served.layer.weight.detach()[:, 3].clone()

    def keep(method: Any, layer: Any) -> None:
        process(method, layer)
        if layer is wrong:
            layer.weight.data[:, 3] = old

    return keep


def packed_with_stale_scale(process: Process, served: Served) -> Process:
    """A packing with the scales of one layer as they were."""
    wrong, old = served.layer, served.layer.weight_scale.detach().clone()

    def keep(kernel: Any, layer: Any) -> None:
        if layer is wrong:
            layer.weight_scale.data.copy_(old)
        process(kernel, layer)

    return keep


def packed_with_stale_row(process: Process, served: Served) -> Process:
    """A packing with the codes of one row as they were: nobody can read them afterwards."""
    codes = served.before.bits(f"{WRONG}.weight").reshape(served.shape)
    wrong, old = served.layer, codes[3].copy()

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
        assert here.layer.weight is None, "its codes are where only a kernel reads them"
        refused_once(here, kernel, stale, monkeypatch)
        now = here.everything()
    assert differences(fresh(here.after), now) == []


def refused_once(
    here: Served,
    method: Any,
    stale: Callable[[Process, Served], Process],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A swap that is refused, after which everything is as before; then one that is not."""
    before = here.everything()
    with monkeypatch.context() as patched:
        process = stale(method.process_weights_after_loading, here)
        patched.setattr(method, "process_weights_after_loading", process)
        with pytest.raises(PartialApplyError, match=f"{WRONG} is not what a fresh load"):
            here.rank.swap(1, 1, back=False)
    assert differences(before, here.everything()) == []
    here.rank.swap(1, 1, back=False)
    assert differences(before, here.everything())


ATTENTION: Final = "model.layers.1.self_attn.attn"
"""A layer with scales of keys and values."""

SCALES: Final = ("_k_scale_float", "_v_scale_float", "_k_scale", "_v_scale", "_k_scale_cpu")
"""What it has of them, on the host as well."""


def test_scales_of_keys_and_values_are_those_of_a_fresh_load(tmp_path: Path) -> None:
    """A CPU computes with keys and values of eight bits; its kernel takes the numbers."""
    with served("llama_kv_scales", tmp_path) as here:
        attention: Any = here.model.get_submodule(ATTENTION)
        assert attention.impl.is_fp8_kv_cache
        before = here.everything()
        here.rank.swap(1, 1, back=False)
        now = here.everything()
        changed = set(differences(before, now))
        assert {f"{ATTENTION}.{name}" for name in SCALES} <= changed
        here.rank.swap(1, 0, back=True)
        assert differences(before, here.everything()) == []
    assert differences(fresh(here.after), now) == []


@pytest.mark.parametrize("kind", SCALES)
def test_scales_of_keys_and_values_that_stay_stale_are_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = import_module(COMPRESSED).CompressedTensorsKVCacheMethod
    process = method.process_weights_after_loading
    with served("llama_kv_scales", tmp_path) as here:
        attention: Any = here.model.get_submodule(ATTENTION)
        before, old = here.everything(), getattr(attention, kind)
        old = old.clone() if isinstance(old, Tensor) else old

        def keep(method: Any, layer: Any) -> None:
            process(method, layer)
            if layer is attention and isinstance(old, float):
                setattr(layer, kind, old)
            elif layer is attention:
                getattr(layer, kind).copy_(old)

        with monkeypatch.context() as patched:
            patched.setattr(method, "process_weights_after_loading", keep)
            with pytest.raises(
                PartialApplyError, match=f"{ATTENTION} is not what a fresh .*{kind}"
            ):
                here.rank.swap(1, 1, back=False)
        assert differences(before, here.everything()) == []
