"""Ways into one rank: which are found, what proves them, and what an attempt leaves behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from deltachain.checkpoint import Checkpoint
from deltachain.errors import TensorMismatchError
from deltachain.kernels import device
from deltachain.replica.layout.discover import Layout, discover, rediscover
from deltachain.replica.layout.loaded_checkpoint import LoadedCheckpoint
from tests.support.engine import ODD, FakeModel, Sharding, full_of, save, trained
from tests.unit.replica.layout.loaders import PLANNED, REFUSED, SIZE, Loader, OneLayer

ARMS = pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])

Make = Callable[..., tuple[OneLayer, LoadedCheckpoint]]


@pytest.fixture
def one_layer(tmp_path: Path) -> Make:
    """Makes an engine of one layer that has loaded a checkpoint of one tensor, or of more."""

    def make(
        loader: Loader, dtype: torch.dtype = torch.bfloat16, **more: Tensor
    ) -> tuple[OneLayer, LoadedCheckpoint]:
        full = {"w": torch.randn(SIZE).to(torch.bfloat16), **more}
        save_file(full, tmp_path / "model.safetensors")
        model = OneLayer(loader, dtype)
        model.checkpoint = tmp_path
        model.load((name, tensor.clone()) for name, tensor in full.items())
        checkpoint = Checkpoint(tmp_path)
        return model, LoadedCheckpoint(checkpoint, checkpoint.specs, {})

    return make


def bits(model: OneLayer) -> dict[str, bytes]:
    """A copy of every live bit."""
    return {n: t.detach().view(torch.uint8).numpy().tobytes() for n, t in model.tensors().items()}


def untouched(model: OneLayer, source: LoadedCheckpoint) -> Layout:
    """Attach, and see that the model is what it was."""
    before, tensors = bits(model), dict(model.tensors())
    at = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    layout = discover(model, source)
    after = model.tensors()
    assert bits(model) == before
    assert all(after[name] is tensor for name, tensor in tensors.items())
    assert {name: tensor.data_ptr() for name, tensor in after.items()} == at
    return layout


# Each class


@pytest.mark.parametrize("style", sorted(set(PLANNED) - {"padded"}))
def test_views_are_written_in_place(one_layer: Make, style: str) -> None:
    model, source = one_layer(PLANNED[style])
    layout = untouched(model, source)
    assert layout.classes == {"w": "in_place"}
    assert not layout.reasons
    report = layout.report()["w"]
    assert sum(torch.Size(size).numel() for _, size, _ in report.windows) == 24


LOADED = {"clone", "compute", "cast and copy", "concatenate", "edit", "index", "temporary"}


@pytest.mark.parametrize("style", [*sorted(LOADED), "copy and double", "fill first"])
def test_what_is_computed_is_loaded(one_layer: Make, style: str) -> None:
    model, source = one_layer(REFUSED[style][0])
    layout = untouched(model, source)
    assert layout.classes == {"w": "loaded"}
    assert REFUSED[style][1] in layout.reasons["w"]
    assert layout.places == {}


def test_what_is_served_in_another_dtype_is_loaded(one_layer: Make) -> None:
    model, source = one_layer(PLANNED["copy"], torch.float32)
    layout = untouched(model, source)
    assert (layout.classes, layout.reasons["w"]) == ({"w": "loaded"}, "the engine serves it as F32")


def test_what_was_changed_after_loading_is_reloaded(one_layer: Make) -> None:
    def flipped(model: OneLayer, w: Tensor) -> None:
        model.p.data.copy_(w.flip(0))

    model, source = one_layer(PLANNED["copy"])
    model.p.data.copy_(model.p.data.flip(0))
    model.reloader = flipped
    layout = untouched(model, source)
    assert layout.classes == {"w": "reloaded"}
    assert "changed its bits after loading" in layout.reasons["w"]


def constant(source: LoadedCheckpoint) -> None:
    """Let every element of the checkpoint, and so of the model, be the same."""
    zeros = np.zeros(24, np.uint16)
    vars(source)["bits"] = lambda _: zeros


def test_bits_that_are_all_alike_are_no_proof_where_layers_are_rearranged(one_layer: Make) -> None:
    """Zeros read back well under any packing."""
    model, source = one_layer(PLANNED["copy"])
    model.p.data.zero_()
    constant(source)
    assert untouched(model, source).classes == {"w": "in_place"}
    model.rearranged, model.repacks = frozenset([""]), True
    layout = untouched(model, source)
    assert layout.classes == {"w": "refused"}, "loading zeros again leads back to zeros as well"
    assert "all elements are equal" in layout.reasons["w"]
    model.plain = True
    assert untouched(model, source).classes == {"w": "in_place"}


def test_one_bit_that_differs_is_enough(one_layer: Make) -> None:
    model, source = one_layer(PLANNED["copy"])
    model.rearranged, model.repacks = frozenset([""]), True
    bits_of = np.zeros(24, np.uint16)
    bits_of[17] = 0x3F80
    vars(source)["bits"] = lambda _: bits_of
    model.p.data.copy_(torch.from_numpy(bits_of.view(np.int16)).view(torch.bfloat16).view(4, 6))
    assert untouched(model, source).classes == {"w": "in_place"}


def test_a_layer_with_a_hidden_copy_is_reloaded(one_layer: Make) -> None:
    model, source = one_layer(PLANNED["copy"])
    model.pack()
    layout = untouched(model, source)
    assert layout.classes == {"w": "reloaded"}
    assert "computes from a packed copy" in layout.reasons["w"]
    assert layout.places == {}


def test_what_a_rank_does_not_load_is_absent(one_layer: Make) -> None:
    model, source = one_layer(lambda _, __: None)
    assert untouched(model, source).classes == {"w": "absent"}


# What is refused, and leaves nothing behind


def accumulate(model: OneLayer, w: Tensor) -> None:
    model.p.data.add_(w)


def quiet(model: OneLayer, w: Tensor) -> None:
    """Loads once, and never again."""
    if not getattr(model, "done", False) and not w.is_meta:
        model.p.data.copy_(w)
        model.done = True  # type: ignore[assignment]
    elif w.is_meta:
        model.p.data.copy_(w.clone())


def replacing(model: OneLayer, w: Tensor) -> None:
    model.p = nn.Parameter(w.clone(), requires_grad=False)


def swapping_data(model: OneLayer, w: Tensor) -> None:
    model.p.data = w.clone()


def half_then_raise(model: OneLayer, w: Tensor) -> None:
    model.p.data[:2] = w[2:]
    raise OSError("device lost")


@ARMS
@pytest.mark.parametrize(
    ("reloader", "why"),
    [
        (accumulate, "p changed"),
        (half_then_raise, "device lost"),
        (lambda _, __: None, "nothing changes with"),
    ],
)
def test_a_reload_that_fails_its_trial_is_refused_and_undone(
    one_layer: Make, reloader: Loader, why: str, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, source = one_layer(PLANNED["copy"])
    if not on_host:
        monkeypatch.setattr(device, "on_host", lambda _: False)
    model.pack()
    model.reloader = reloader
    layout = untouched(model, source)
    assert layout.classes == {"w": "refused"}
    assert why in layout.reasons["w"]


@pytest.mark.parametrize("loader", [accumulate, quiet])
def test_a_loader_that_fails_its_trial_is_refused_and_undone(
    one_layer: Make, loader: Loader
) -> None:
    model, source = one_layer(loader)
    layout = untouched(model, source)
    assert layout.classes == {"w": "refused"}


def test_tensors_at_the_same_elements_are_not_written_in_place(one_layer: Make) -> None:
    same = torch.zeros(SIZE, dtype=torch.bfloat16)
    model, source = one_layer(PLANNED["copy"], w=same, v=same.clone())
    layout = untouched(model, source)
    assert set(layout.classes.values()) == {"refused"}
    assert any("shares live elements" in reason for reason in layout.reasons.values())


# Coverage


@pytest.mark.parametrize("reloader", [replacing, swapping_data])
def test_a_reload_may_replace_tensors_they_keep_their_memory(
    one_layer: Make, reloader: Loader
) -> None:
    model, source = one_layer(PLANNED["copy"])
    model.pack()
    model.reloader = reloader
    assert untouched(model, source).classes == {"w": "reloaded"}


@pytest.mark.parametrize(
    "extra", [torch.zeros(3, dtype=torch.int64), torch.zeros(1), torch.ones(4, 4)]
)
def test_a_constant_of_the_engine_needs_no_source(one_layer: Make, extra: Tensor) -> None:
    model, source = one_layer(PLANNED["copy"])
    model.register_buffer("extra", extra)
    assert untouched(model, source).classes == {"w": "in_place"}


def test_a_packed_copy_is_no_constant_because_nothing_can_pack_again(one_layer: Make) -> None:
    """A load without post-load processing leaves it as it is, whatever is loaded."""
    model, source = one_layer(PLANNED["copy"])
    model.head = nn.Module()
    model.head.register_buffer("packed", model.p.data.clone())
    model.rearranged = frozenset({"head"})

    def fails(*_: object) -> None:
        raise ValueError("no layer is loaded twice")

    model.reloader = fails
    with pytest.raises(TensorMismatchError, match=r"head\.packed .* cannot be tested"):
        untouched(model, source)


# A checkpoint that is not the chain's


@pytest.mark.parametrize(
    ("have", "why"),
    [
        ({"v": torch.zeros(SIZE, dtype=torch.bfloat16)}, "has no 'w'"),
        ({"w": torch.zeros(SIZE)}, r"is F32\[4, 6\]"),
        ({"w": torch.zeros(6, 4, dtype=torch.bfloat16)}, r"is BF16\[6, 4\]"),
    ],
)
def test_another_models_checkpoint_is_refused(
    one_layer: Make, tmp_path: Path, have: dict[str, Tensor], why: str
) -> None:
    _, source = one_layer(PLANNED["copy"])
    (tmp_path / "other").mkdir()
    save_file(have, tmp_path / "other" / "model.safetensors")
    with pytest.raises(TensorMismatchError, match=why) as caught:
        LoadedCheckpoint(Checkpoint(tmp_path / "other"), source.specs, {})
    assert caught.value.tensor == "w"


# Whole engines


@ARMS
@pytest.mark.parametrize("shape", [Sharding(odd=tuple(ODD)), Sharding(tp=2, odd=tuple(ODD))])
def test_every_awkward_tensor_gets_the_class_it_should(
    shape: Sharding, tmp_path: Path, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not on_host:
        monkeypatch.setattr(device, "on_host", lambda _: False)
    model = trained(shape)
    folder = save(model, tmp_path)
    checkpoint = Checkpoint(folder)
    for rank in range(shape.ranks):
        engine = FakeModel(shape, rank, folder)
        layout = discover(engine, LoadedCheckpoint(checkpoint, checkpoint.specs, {}))
        assert engine.holds(full_of(model)), "discovery changed it"
        found = {name.split(".")[2]: kind for name, kind in layout.classes.items() if "0." in name}
        assert {name: found[name] for name in ODD} == {
            "conv": "in_place",
            "sliced": "in_place",
            "cast": "loaded",
            "decay": "loaded",
            "bias": "refused" if rank else "in_place",  # zeros there: nothing follows it
            "indexed": "loaded",
            "flipped": "reloaded",
            "packed": "reloaded",
            "shadow": "reloaded",
            "stuck": "refused",
        }
        experts = Counter(kind for n, kind in layout.classes.items() if "experts" in n)
        assert (experts["in_place"], experts["absent"]) == (8 // shape.tp, 8 - 8 // shape.tp)


@pytest.mark.parametrize("layers", [2, 8])
def test_a_trial_goes_over_the_model_hardly_more_often_the_more_layers_it_has(
    layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Sharding(layers=layers, odd=("packed", "flipped"))
    folder = save(trained(shape), tmp_path)
    checkpoint = Checkpoint(folder)
    reloads = []
    reload = FakeModel.reload

    def counted(model: FakeModel, tensors: Iterable[tuple[str, Tensor]]) -> None:
        reloads.append(1)
        reload(model, tensors)

    monkeypatch.setattr(FakeModel, "reload", counted)
    layout = discover(
        FakeModel(shape, 0, folder), LoadedCheckpoint(checkpoint, checkpoint.specs, {})
    )
    assert Counter(layout.classes.values())["reloaded"] == 2 * layers
    fixed, digits = 12, (2 * layers - 1).bit_length()
    assert len(reloads) <= fixed + 2 * digits, "one load more for each half of the groups"


def test_both_names_of_a_tied_weight_are_one_place_where_they_are_one(tmp_path: Path) -> None:
    for untied in (False, True):
        shape = Sharding(untied=untied)
        engine = FakeModel(shape, 0, save(trained(shape), tmp_path))
        checkpoint = Checkpoint(tmp_path)
        source = LoadedCheckpoint(checkpoint, checkpoint.specs, {"head.weight": "embed.weight"})
        layout = discover(engine, source)
        assert len(layout.places["embed.weight"]) == 1 + untied
        one, *others = (place.window for place in layout.places["embed.weight"])
        assert all(other == one for other in others)


def test_replaced_tensors_are_found_again(tmp_path: Path) -> None:
    shape = Sharding(odd=("conv", "cast", "packed"))
    engine = FakeModel(shape, 0, save(trained(shape), tmp_path))
    checkpoint = Checkpoint(tmp_path)
    source = LoadedCheckpoint(checkpoint, checkpoint.specs, {})
    before = discover(engine, source)
    for name in ("layers.0.qkv.weight", "layers.1.conv.weight"):
        live = engine.root.get_parameter(name)
        live.data = torch.zeros_like(live.data)
    after = rediscover(engine, source, before)
    assert after.report() == before.report()
    moved = {
        name
        for name, places in before.places.items()
        for one, other in zip(places, after.places[name], strict=True)
        if one.live.data_ptr() != other.live.data_ptr()
    }
    assert moved == {"layers.1.conv.weight", *(f"layers.0.{n}.weight" for n in "qkv")}


def test_another_layout_is_not_followed(tmp_path: Path) -> None:
    shape = Sharding(tp=2)
    folder = save(trained(shape), tmp_path)
    checkpoint = Checkpoint(folder)
    source = LoadedCheckpoint(checkpoint, checkpoint.specs, {})
    before = discover(FakeModel(shape, 0, folder), source)
    with pytest.raises(TensorMismatchError, match="changed the layout of its weights"):
        rediscover(FakeModel(shape, 1, folder), source, before)


def test_a_number_that_is_nan_is_a_constant_as_any_other(one_layer: Make) -> None:
    model, source = one_layer(PLANNED["copy"])
    vars(model)["limit"] = float("nan")
    assert untouched(model, source).classes == {"w": "in_place"}
