"""Diffs of models that are quantised: on the host and on a device, and what they refuse."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from deltachain.errors import ConfigError
from deltachain.publish.model.source import collect_weights
from deltachain.publish.quantise.settings import RECIPES
from deltachain.publish.quantise.tensors import quantise
from deltachain.publish.ranks.collectives import Ranks
from deltachain.publish.snapshot import Snapshot, SnapshotPlace
from tests.unit.publish.test_quantise_matrices import heavy


def masters_of(shape: tuple[int, int], seed: int) -> Tensor:
    """Weights between bf16 numbers, many of them halfway."""
    generator = torch.Generator().manual_seed(seed)
    values = heavy(shape, generator)
    halfway = torch.rand(shape, generator=generator) < 0.3
    bits = values.view(torch.int32)
    return torch.where(halfway, bits & ~0xFFFF | 0x8000, bits).view(torch.float32)


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.ModuleDict({"a": nn.Linear(300, 260), "b": nn.Linear(260, 130, bias=False)})


def weight_of(model: nn.Module, layer: str) -> Tensor:
    return dict(model.named_parameters())[f"{layer}.weight"]


def quantised_snapshot(
    model: nn.Module, recipe: str, *, on_device: bool, where: SnapshotPlace | None = None
) -> Snapshot:
    source = collect_weights(model, dtype="BF16")
    made = quantise(source, {"a.weight", "b.weight"}, RECIPES[recipe], Ranks.alone())
    made.agree("begin")
    return Snapshot(made, where=where, on_device=on_device)


def kept(snapshot: Snapshot) -> dict[str, bytes]:
    source = snapshot._source
    return {w.spec.name: snapshot.bits(w).tobytes() for w in source.weights}


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", [n for n in sorted(RECIPES) if RECIPES[n].arithmetic.rounding])
def test_the_device_path_finds_what_the_host_path_finds(
    recipe: str, dtype: torch.dtype, where: SnapshotPlace
) -> None:
    model = model_of(1).to(dtype)
    host = quantised_snapshot(model, recipe, on_device=False)
    device = quantised_snapshot(model, recipe, on_device=True, where=where)
    assert host.state == device.state
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for parameter in model.parameters():
                moved = torch.rand(parameter.shape, generator=generator) < 0.02
                parameter.mul_(torch.where(moved, 1.01 + step, 1.0).to(dtype))
        one, other = host.diff_(), device.diff_()
        assert one.live.keys() == other.live.keys() > {"a.weight", "b.weight"}
        for name, changes in one.live.items():
            for mine, theirs in zip(changes, other.live[name], strict=True):
                np.testing.assert_array_equal(mine, theirs)
        assert host.state == device.state
        assert kept(host) == kept(device)


@pytest.mark.parametrize("where", [None, "host", "device"])
def test_a_refused_weight_takes_the_whole_diff_back(where: SnapshotPlace | None) -> None:
    """On a device the refusal comes after all other tensors are compared."""
    model = model_of(1)
    snapshot = quantised_snapshot(model, "fp8-block", on_device=where is not None, where=where)
    before, state = kept(snapshot), snapshot.state
    right = weight_of(model, "b").detach().clone()
    with torch.no_grad():
        weight_of(model, "a").mul_(1.5)
        weight_of(model, "b")[129, 259] = torch.nan
    with pytest.raises(ConfigError, match=r"'b\.weight' has values that are not finite"):
        snapshot.diff_()
    assert (kept(snapshot), snapshot.state) == (before, state)
    with torch.no_grad():
        weight_of(model, "b").copy_(right)
    assert set(snapshot.diff_().live) == {"a.weight", "a.weight_scale_inv"}


def test_weights_that_become_zeros_are_named_once_on_a_device(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = model_of(1)
    snapshot = quantised_snapshot(model, "int8-row", on_device=True, where="device")
    with torch.no_grad():
        weight_of(model, "a")[3:5] = 1e-39
    for _ in range(2):
        assert snapshot.diff_().nnz >= 0
    named = [one for one in caplog.messages if "are published as 0" in one]
    assert len(named) == 1
    assert named[0].startswith("'a.weight': weights of at most 1.0e-39")


def test_an_export_that_is_quantised_may_use_its_memory_again() -> None:
    values = {name: masters_of((130, 140), seed) for seed, name in enumerate("abc")}

    def export() -> Iterator[tuple[str, Tensor]]:
        room = torch.empty(130, 140)
        for name, value in values.items():
            yield name, room.copy_(value)

    found = []
    for on_device in (False, True):
        source = collect_weights(export, dtype="BF16")
        made = quantise(source, set(values), RECIPES["fp8-block"], Ranks.alone())
        made.agree("begin")
        snapshot = Snapshot(made, on_device=on_device, where="device" if on_device else None)
        values["a"] *= 1.01
        values["c"] *= 1.02
        found.append({n: [c.tolist() for c in some] for n, some in snapshot.diff_().live.items()})
        values["a"] /= 1.01
        values["c"] /= 1.02
    assert {"a", "c"} < set(found[0])
    assert found[0]["c"] == found[1]["c"]
    assert "b" not in found[0] | found[1]
