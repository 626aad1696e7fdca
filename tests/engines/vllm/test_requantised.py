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
from deltachain.replica.rank import Rank
from deltachain.testing.spools import spool_of
from tests.engines.compare import copied, differences, live
from tests.engines.families import checkpoint
from tests.engines.matrix import Change, attached, changed
from tests.engines.vllm.fresh import known, load_in_context

pytestmark = pytest.mark.engine

ONLINE: Final = "vllm.model_executor.layers.quantization.online.fp8"
KERNEL: Final = "vllm.model_executor.kernels.linear.scaled_mm.cpu"
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
        outputs = self.engine.compute(frozenset(self.engine.modules()))
        return copied(live(self.model)) | {f"{n}()": t for n, t in copied(outputs).items()}


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
        engine = known(config, model)
        outputs = engine.compute(frozenset(engine.modules()))
        return copied(live(model)) | {f"{n}()": t for n, t in copied(outputs).items()}


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
