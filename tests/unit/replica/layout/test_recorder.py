"""Dry runs of loaders: what is planned, what is given a reason, and that nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from deltachain.replica.layout.recorder import Recording, live_tensors, record
from deltachain.replica.windows import Window
from deltachain.types import TensorSpec
from tests.support.engine import FakeModel, Sharding, save, trained
from tests.unit.replica.layout.loaders import PLANNED, REFUSED, SIZE, Loader, OneLayer

SPEC = TensorSpec("w", "BF16", SIZE)
OTHER = TensorSpec("v", "BF16", SIZE)


def run(model: OneLayer, *specs: TensorSpec) -> Recording:
    """Record, and see that every live bit is what it was."""
    recording = record(model.load, specs or [SPEC], model.modules())
    assert all(bool((tensor == 7).all()) for tensor in model.tensors().values()), "it was written"
    return recording


def loaded(loader: Loader, full: Tensor) -> dict[str, Tensor]:
    """What the loader does when it is let through."""
    model = OneLayer(loader)
    with torch.no_grad():
        loader(model, full)
    return {name: tensor.detach() for name, tensor in model.tensors().items()}


@pytest.mark.parametrize("style", PLANNED)
def test_views_are_planned_and_lead_where_the_loader_copies(style: str) -> None:
    model = OneLayer(PLANNED[style])
    recording = run(model)
    assert not recording.reasons
    assert not recording.raised
    full = torch.arange(24).to(torch.bfloat16)
    bits = full.view(torch.int16).numpy().view("<u2")
    for place in recording.places["w"]:
        view: Any = place.view
        view[...] = place.cut(bits)
    truth = loaded(PLANNED[style], full.view(SIZE))
    rows = 3 if style == "padded" else 4  # what is filled comes from no checkpoint
    for name, tensor in model.tensors().items():
        assert torch.equal(tensor[:rows], truth[name][:rows])


@pytest.mark.parametrize("style", REFUSED)
def test_anything_else_gets_a_reason_and_no_place(style: str) -> None:
    loader, why = REFUSED[style]
    recording = run(OneLayer(loader))
    assert not recording.places.get("w")
    assert why in recording.reasons["w"]
    assert recording.raised == ({"w"} if "raised" in recording.reasons["w"] else frozenset())


@pytest.mark.parametrize("style", REFUSED)
def test_one_awkward_tensor_does_not_spoil_the_others(style: str) -> None:
    loader, _ = REFUSED[style]

    def load(tensors: Any) -> None:
        for name, tensor in tensors:
            (model.b.copy_ if name == "v" else lambda w: loader(model, w))(tensor)

    model = OneLayer(loader)
    recording = record(load, [OTHER, SPEC], model.modules())
    assert [place.window for place in recording.places["v"]] == [Window(0, (24,), (1,))]
    assert "w" in recording.reasons
    assert "w" not in recording.places


def test_what_a_rank_does_not_load_has_neither_place_nor_reason() -> None:
    recording = run(OneLayer(lambda _, __: None))
    assert recording.places["w"] == ()
    assert not recording.reasons


def test_a_cast_is_a_place_of_another_dtype() -> None:
    """What becomes of it is for those to say who read it back."""
    model = OneLayer(PLANNED["copy"], torch.float32)
    (place,) = run(model).places["w"]
    assert place.live.dtype == torch.float32


def test_a_loader_is_called_once_if_everything_is_a_view() -> None:
    calls: list[int] = []

    def load(tensors: Any) -> None:
        calls.append(len(tensors))
        for _, tensor in tensors:
            model.p.data.copy_(tensor)

    model = OneLayer(PLANNED["copy"])
    record(load, [SPEC, OTHER], model.modules())
    assert calls == [2]
    model = OneLayer(lambda m, w: m.p.data.copy_(w.clone()))
    calls.clear()

    def load_clones(tensors: Any) -> None:
        calls.append(len(tensors))
        model.load(tensors)

    record(load_clones, [SPEC, OTHER], model.modules())
    assert calls == [2], "what a clone was made from is known"


def replace_parameter(model: OneLayer, _: Tensor) -> None:
    model.p = nn.Parameter(torch.full(SIZE, 7, dtype=torch.bfloat16), requires_grad=False)


def replace_data(model: OneLayer, _: Tensor) -> None:
    model.p.data = model.p.data.clone()


def remove_parameter(model: OneLayer, _: Tensor) -> None:
    del model.p


def register_late(model: OneLayer, w: Tensor) -> None:
    model.late = nn.Parameter(torch.empty(SIZE), requires_grad=False)
    model.late.data.copy_(w)


@pytest.mark.parametrize(
    "loader", [replace_parameter, replace_data, remove_parameter, register_late]
)
def test_a_dry_run_leaves_every_member_as_it_was(loader: Loader) -> None:
    model = OneLayer(loader)
    before = {**vars(model)}, dict(model._parameters), model.p, model.p.data_ptr()
    record(model.load, [SPEC], model.modules())
    assert ({**vars(model)}, dict(model._parameters), model.p, model.p.data_ptr()) == before


def test_tensors_that_a_loader_joins_are_known_to_belong_together() -> None:
    held: dict[str, Tensor] = {}

    def load(tensors: Any) -> None:
        for name, tensor in tensors:
            held[name] = tensor
            if len(held) == 2:
                model.p.data.copy_(torch.cat([held.pop("v")[:2], held.pop("w")[:2]]))

    model = OneLayer(lambda _, __: None)
    recording = record(load, [SPEC, OTHER], model.modules())
    assert recording.together == (frozenset(["v", "w"]),)
    assert recording.reasons.keys() == {"v", "w"}


def test_live_tensors_are_parameters_buffers_and_attributes_with_elements() -> None:
    model = OneLayer(PLANNED["copy"])
    model.extra = torch.zeros(2)
    model.empty = nn.Parameter(torch.zeros(0))
    model.absent = torch.zeros(2, device="meta")
    outer = nn.Sequential(model)
    assert set(live_tensors(outer)) == {"0.p", "0.b", "0.extra"}


def test_elements_that_no_tensor_fills_have_no_place(tmp_path: Path) -> None:
    """Rows that pad a vocabulary, and none of them a tensor's."""
    shape = Sharding(tp=4)
    engine = FakeModel(shape, 3, save(trained(shape), tmp_path))
    spec = TensorSpec("embed.weight", "BF16", (50, 16))
    recording = record(engine.load, [spec], engine.modules())
    (place,) = recording.places["embed.weight"]
    assert place.window == Window(42 * 16, (8 * 16,), (1,))
    assert np.shares_memory(
        np.asarray(place.view), engine.root.get_parameter("embed.weight").view(torch.int16).numpy()
    )
