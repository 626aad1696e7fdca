"""Pending codes: one pass finds what changed among the library's codes, of masters too."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from deltachain.errors import ConfigError
from deltachain.kernels import reference
from deltachain.publish.model.layout import Box, ElementMap
from deltachain.publish.model.source import ModelTensors, Weight, collect_weights
from deltachain.publish.quantise import host_codes
from deltachain.publish.quantise.host_codes import block_scales, magnitude_bits
from deltachain.publish.quantise.settings import RECIPES
from deltachain.publish.quantise.tensors import PendingCodes, quantise, window_amax
from deltachain.publish.ranks.collectives import Ranks
from deltachain.publish.snapshot import Snapshot
from deltachain.publish.snapshot_memory import SnapshotPlace
from deltachain.types import TensorSpec
from tests.unit.publish.test_quantise_matrices import NAME, heavy, library, windows

pytest.importorskip("numba")

SHAPES = [(300, 280), (77, 410), (1, 600), (257, 1), (700, 130)]


def of_windows(recipe: str, masters: Tensor, boxes: list[Box]) -> ModelTensors:
    """Windows of a matrix, each a weight of its own that is published as bf16."""
    spec = TensorSpec(NAME, "BF16", tuple(masters.shape))
    weights = []
    for number, box in enumerate(boxes):
        (top, left), (rows, columns) = box.offset, box.shape
        part = masters[top : top + rows, left : left + columns].contiguous()
        live = TensorSpec(f"part {number}", "BF16", spec.shape)
        weights.append(Weight(live, part, frozen=False, element_map=ElementMap.straight(spec, box)))
    source = ModelTensors(
        tuple(weights), (spec,), {}, lambda: ((one.spec.name, one.tensor) for one in weights)
    )
    return quantise(source, {NAME}, RECIPES[recipe], Ranks.alone())


def pending_of(source: ModelTensors) -> Iterator[tuple[Box, PendingCodes]]:
    """Pending codes of every window, before their scales are asked for."""
    source.agree("test")
    for weight in source.live_weights():
        if weight.pending is not None:
            assert isinstance(weight.pending, PendingCodes)
            yield weight.element_map.box, weight.pending


def masters_of(shape: tuple[int, int], seed: int) -> Tensor:
    """Weights between bf16 numbers, many of them halfway."""
    generator = torch.Generator().manual_seed(seed)
    values = heavy(shape, generator)
    halfway = torch.rand(shape, generator=generator) < 0.3
    bits = values.view(torch.int32)
    return torch.where(halfway, bits & ~0xFFFF | 0x8000, bits).view(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", [n for n in sorted(RECIPES) if RECIPES[n].has_kernel])
def test_changes_are_those_between_the_librarys_codes(
    recipe: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_codes, "LEAST", 5000)  # several threads
    for seed, shape in enumerate(SHAPES):
        masters = masters_of(shape, seed)
        codes = library(RECIPES[recipe], masters.bfloat16())[NAME].view(torch.uint8)
        for boxes in ([Box.whole(shape)], list(windows(shape, random.Random(seed)))):
            before = masters.clone()
            for density, (box, pending) in zip(
                (0.01, 1.0, 0.0) * len(boxes),
                pending_of(of_windows(recipe, masters.to(dtype), boxes)),
                strict=False,
            ):
                (top, left), (rows, columns) = box.offset, box.shape
                part = codes[top : top + rows, left : left + columns].contiguous()
                new = part.view(-1).numpy()
                rng = np.random.default_rng(seed)
                old = np.where(rng.random(new.size) < density, new ^ np.uint8(129), new)
                expected = reference.diff_(old.copy(), new)
                found = pending.diff_(old)
                for one, other in zip(expected, found, strict=True):
                    assert one.dtype == other.dtype
                    np.testing.assert_array_equal(one, other)
                np.testing.assert_array_equal(old, new)
            assert torch.equal(before.view(torch.int32), masters.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_masters_of_other_dtypes_are_cast_by_torch(dtype: torch.dtype) -> None:
    masters = masters_of((150, 140), 1).to(dtype)
    codes = library(RECIPES["fp8-block"], masters.bfloat16())[NAME].view(torch.uint8)
    ((_, pending),) = list(pending_of(of_windows("fp8-block", masters, [Box.whole((150, 140))])))
    snapshot = np.zeros(codes.numel(), np.uint8)
    assert pending.diff_(snapshot).indices.size > 0
    np.testing.assert_array_equal(snapshot, codes.reshape(-1).numpy())


@pytest.mark.parametrize("recipe", [n for n in sorted(RECIPES) if RECIPES[n].has_kernel])
def test_tables_are_the_library_on_every_block(recipe: str) -> None:
    chosen, tables = RECIPES[recipe], block_scales(RECIPES[recipe], torch.device("cpu"))
    for seed, shape in enumerate(SHAPES):
        generator = torch.Generator().manual_seed(seed)
        bits = torch.randint(0, 0x7F80, shape, generator=generator).to(torch.int16)
        amax = bits.view(torch.bfloat16)
        scales = chosen.arithmetic.scales(amax)
        factors = chosen.arithmetic.factors(amax, scales)
        assert torch.equal(
            tables.scales_of(amax).view(torch.uint8), scales.contiguous().view(torch.uint8)
        )
        accepted = scales.float().isfinite() & (scales.float() > 0)
        found = tables.factors_of(amax)
        assert torch.equal(found[accepted], factors[accepted])
        assert bool((found[accepted] > 0).all())
        assert not found[~accepted].any()
    odd = torch.tensor([torch.inf, torch.nan, -torch.nan], dtype=torch.bfloat16)
    assert not tables.factors_of(odd).any()
    assert magnitude_bits(odd).max() < tables.factors.numel()


@pytest.mark.parametrize("recipe", ["fp8-block", "int8-row", "fp8-tensor"])
def test_largest_magnitudes_in_torch_are_those_of_the_kernel(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_codes, "LEAST", 5000)
    for seed, shape in enumerate(SHAPES):
        masters = masters_of(shape, seed)
        masters[-1, -1] = (3.4e38, -torch.inf, 1e-41)[seed % 3]
        grid = RECIPES[recipe].grid(TensorSpec(NAME, "BF16", shape))
        for box in windows(shape, random.Random(seed)):
            (top, left), (rows, columns) = box.offset, box.shape
            part = masters[top : top + rows, left : left + columns].contiguous()
            in_torch = window_amax(part, grid, box).bfloat16()
            assert torch.equal(in_torch, host_codes.amax(part, grid, box))
    odd = torch.full((1, 3), torch.nan)
    box = Box.whole((1, 3))
    grid = RECIPES[recipe].grid(TensorSpec(NAME, "BF16", (1, 3)))
    assert host_codes.amax(odd, grid, box).isnan().all()
    assert window_amax(odd, grid, box).isnan().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3.4e38])
@pytest.mark.parametrize("recipe", [n for n in sorted(RECIPES) if RECIPES[n].has_kernel])
def test_a_refused_weight_leaves_the_snapshot_as_it_was(
    recipe: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where other threads, and bands before it, have changed it."""
    monkeypatch.setattr(host_codes, "LEAST", 5000)
    masters = masters_of((700, 300), 1)
    masters[699, 299] = value  # 3.4e38 is infinity in bf16
    _, pending = next(pending_of(of_windows(recipe, masters, [Box.whole((700, 300))])))
    snapshot = np.random.default_rng(1).integers(0, 256, masters.numel(), np.uint8)
    before = snapshot.copy()
    with pytest.raises(ConfigError, match="has values that are not finite"):
        pending.diff_(snapshot)
    np.testing.assert_array_equal(snapshot, before)
    with pytest.raises(ConfigError, match="has values that are not finite"):
        pending.make()


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
@pytest.mark.parametrize("recipe", [n for n in sorted(RECIPES) if RECIPES[n].has_kernel])
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
