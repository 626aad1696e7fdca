import gc
from collections import Counter
from collections.abc import Iterable
from itertools import chain, permutations
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from deltachain.checkpoint import Checkpoint
from deltachain.errors import EngineDamagedError, TensorMismatchError
from deltachain.kernels import numba_kernels, torch_kernels
from deltachain.replica.layout import loaded_checkpoint
from deltachain.replica.layout.discover import Layout, discover, recorded, rediscover
from deltachain.replica.layout.in_place import again
from deltachain.replica.layout.load_sets import crossing, separating
from deltachain.replica.layout.loaded_checkpoint import LoadedCheckpoint, other_bits
from deltachain.replica.layout.module_members import (
    Members,
    MemoryIndex,
    SavedBits,
    may_hide_tensors,
    overlap,
    restoring,
    tensors_in,
    undisturbed,
)
from tests.contract import reference
from tests.support.engine import ODD, FakeModel, Sharding, full_of, save, trained
from tests.unit.replica.layout.conftest import Make
from tests.unit.replica.layout.loaders import PLANNED, REFUSED, SIZE, Loader, OneLayer


class Kernel:
    """What a quantisation method sets up, and keeps weights in."""

    def __init__(self, packed: Tensor) -> None:
        self.packed = packed


class Method:
    kernel: Kernel | None = None

    def process_weights_after_loading(self, layer: Any) -> None:
        self.kernel = Kernel(layer.weight.data.clone())


class Handle:
    """Owns what a library made, and keeps its address in a tensor: oneDNN's are like that."""

    living: ClassVar[set[int]] = set()

    def __init__(self, address: int) -> None:
        self.address = torch.tensor(address)
        self.living.add(address)

    def __del__(self) -> None:
        self.living.discard(int(self.address))


class Layer(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8), requires_grad=False)
        self.register_buffer("scale", torch.ones(1))
        self.split = [torch.ones(2), torch.zeros(2)]
        self.quant_method: Any = Method()
        self.quant_method.process_weights_after_loading(self)


def everything(layer: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {f"attribute {name}": id(value) for name, value in vars(layer).items()}
    found |= {f"parameter {name}": id(value) for name, value in layer._parameters.items()}
    found |= {f"hook {name}": id(value) for name, value in layer._forward_hooks.items()}
    for name, tensor in tensors_in(layer):
        found[name] = (id(tensor), tensor.data_ptr(), tensor.detach().numpy().tobytes())
    return found


def disturb(layer: Layer) -> None:
    layer.weight = nn.Parameter(torch.zeros(0), requires_grad=False)
    layer.register_parameter("late", nn.Parameter(torch.zeros(3), requires_grad=False))
    layer.register_forward_hook(lambda *_: None)
    layer.scale.data = torch.zeros(1)
    layer.split[0] = torch.zeros(2)
    layer.split[1].fill_(9)
    layer.quant_method.kernel = None
    layer.note = 1  # type: ignore[assignment]
    del layer._buffers["scale"]


def test_whatever_the_body_does_everything_is_as_it_was() -> None:
    layer = Layer()
    before = everything(layer)
    tensors = dict(tensors_in(layer))

    def act() -> None:
        with undisturbed([layer], tensors):
            disturb(layer)
            raise OSError("device lost")

    with pytest.raises(OSError, match="lost"):
        act()
    assert everything(layer) == before


def test_members_stay_as_the_body_left_them_unless_it_raises() -> None:
    layer = Layer()
    with restoring(Members([layer])):
        layer.note = 1  # type: ignore[assignment]
    assert layer.note == 1


def test_tensors_in_lists_and_in_what_acts_after_loading_are_found() -> None:
    names = {name for name, _ in tensors_in(Layer())}
    assert names == {"weight", "scale", "split.0", "split.1", "quant_method.kernel.packed"}


def test_new_tensors_are_settled_into_the_old_ones() -> None:
    layer = Layer()
    at = {name: (id(tensor), tensor.data_ptr()) for name, tensor in tensors_in(layer)}
    members = Members([layer])
    new = torch.randn(4, 8)
    layer.weight = nn.Parameter(new, requires_grad=False)
    layer.split = [torch.full((2,), 5.0), torch.full((2,), 6.0)]
    layer.quant_method.process_weights_after_loading(layer)
    layer.kernel = len  # type: ignore[assignment]
    members.settle()
    assert {name: (id(tensor), tensor.data_ptr()) for name, tensor in tensors_in(layer)} == at
    assert torch.equal(layer.weight, new)
    assert torch.equal(layer.quant_method.kernel.packed, new)
    assert [float(one[0]) for one in layer.split] == [5.0, 6.0]
    assert layer.kernel is len


@pytest.mark.parametrize("goes_on", [True, False])
def test_what_owns_something_is_taken_whole(*, goes_on: bool) -> None:
    """With the address of a new handle, the old one would own what ends with the new one."""
    layer = Layer()
    layer.quant_method.handle = Handle(1)
    assert "quant_method.handle.address" not in dict(tensors_in(layer))
    members = Members([layer])
    layer.quant_method.handle = Handle(2)
    assert list(members.replaced()) == [layer.quant_method.handle]
    assert may_hide_tensors(layer.quant_method.handle)
    if goes_on:
        members.settle()
    else:
        members.put_back()
    del members
    gc.collect()
    assert int(layer.quant_method.handle.address) == 1 + goes_on
    assert Handle.living == {1 + goes_on}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda layer: delattr(layer, "weight"), "dropped its tensor 'weight'"),
        (lambda layer: setattr(layer, "extra", torch.ones(1)), "another tensor, 'extra'"),
        (lambda layer: setattr(layer, "scale", torch.ones(2)), r"float32\(2,\), it was"),
        (lambda layer: setattr(layer, "scale", torch.ones(1).double()), "as torch.float64"),
    ],
    ids=["dropped", "extra", "shape", "dtype"],
)
def test_what_cannot_be_settled_is_told(change: Any, why: str) -> None:
    layer = Layer()
    members = Members([layer])
    change(layer)
    with pytest.raises(TensorMismatchError, match=why):
        members.settle()


def test_bits_of_a_checkpoint_are_written_again_instead_of_copied() -> None:
    layer = Layer()
    before, kept = layer.weight.detach().clone(), [layer.weight.detach().clone()]
    address = layer.weight.untyped_storage().data_ptr()
    bits = SavedBits(dict(tensors_in(layer)), {address: lambda: layer.weight.data.copy_(kept[0])})
    layer.weight.data.zero_()
    layer.scale.zero_()
    bits.put_back()
    assert torch.equal(layer.weight, before)
    assert layer.scale.item() == 1
    kept[0] = torch.ones(4, 8)
    bits.put_back()
    assert torch.equal(layer.weight, before), "nothing had changed"
    layer.weight.data.zero_()
    with pytest.raises(EngineDamagedError, match="checkpoint on disk changed"):
        bits.put_back()
    kept.clear()
    with pytest.raises(EngineDamagedError, match="IndexError"):
        bits.put_back()


def test_bits_know_what_changed() -> None:
    layer = Layer()
    bits = SavedBits(dict(tensors_in(layer)))
    assert not bits.has_changed(layer.weight)
    layer.weight.data[3, 7] += 1
    assert bits.has_changed(layer.weight)
    assert not bits.has_changed(layer.scale)
    assert bits.has_changed(torch.ones(3)), "memory that was not recorded"
    bits.put_back()
    assert not bits.has_changed(layer.weight)


DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [2, 3, 4, 7, 33])
@pytest.mark.parametrize("first", [0, 1, 96])
def test_every_element_is_another_and_no_row_or_column_its_own_mirror_image(
    dtype: torch.dtype, width: int, first: int
) -> None:
    for rows in (1, 2, 5):
        tensor = torch.full((rows, width), first).to(dtype)
        other = other_bits(tensor.clone()).float()
        assert (other != tensor.float()).all()
        assert (other[:, 0] != other[:, -1]).all()
        assert rows == 1 or (other[0] != other[-1]).all()


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_every_finite_number_becomes_one_that_differs_by_a_factor_of_two(
    dtype: torch.dtype, turn: int
) -> None:
    bits = 8 * dtype.itemsize
    words = torch.arange(-(1 << bits - 1), 1 << bits - 1).to({8: torch.int8, 16: torch.int16}[bits])
    numbers = words.view(dtype)
    numbers = numbers[numbers.float().isfinite()]
    others = other_bits(numbers.clone(), turn)
    assert others.float().isfinite().all()
    before, after = numbers.float().abs(), others.float().abs()
    smallest = torch.finfo(dtype).tiny  # subnormal numbers have fewer bits to lose
    is_normal = (before >= smallest) & (after >= smallest)
    ratio = (after / before)[is_normal].log2().abs()
    assert ((ratio >= 1) & (ratio <= 3)).all()
    assert (before != after).all()
    other_turn = other_bits(numbers.clone(), 1 - turn)
    assert (other_turn.view(words.dtype) != others.view(words.dtype))[:-1].all()  # but a corner


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_compiled_kernels_change_exponents_as_the_reference_does(width: int) -> None:
    kind = np.dtype(f"i{width}").type
    words = np.frombuffer(np.random.default_rng(1).bytes(100_003 * width), kind).copy()
    words[:4] = [0, np.iinfo(kind).min, np.iinfo(kind).max, -1]
    steps = np.resize(np.array([8, 16, 24], kind), words.size)
    expected = words.copy()
    for kernels, changed in ((reference, expected), (numba_kernels, words)):
        kernels.rescale_(changed, steps, 56, 88)
    assert np.array_equal(words, expected)


def test_a_number_and_a_flag_have_others_too() -> None:
    assert other_bits(torch.tensor(1.5)).item() != 1.5
    assert other_bits(torch.tensor([True, False])).tolist() == [False, True]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_views_of_one_storage_are_tied_where_they_have_an_element_in_common(device: str) -> None:
    whole = torch.zeros(4, 6, device=device)
    holders = MemoryIndex([("all", whole), ("one", whole[:2]), ("other", whole[2:])])
    assert holders.overlapping(whole[0]) == {"all", "one"}
    assert holders.overlapping(whole[1:3]) == {"all", "one", "other"}
    assert holders.in_storage_of(whole[0]) == {"all", "one", "other"}
    assert holders.tied(frozenset({"one"})) == {"all", "one"}
    assert holders.tied(frozenset({"one", "elsewhere"})) == {"all", "one", "elsewhere"}
    assert holders.overlapping(torch.zeros(4, 6, device=device)) == frozenset()


def cases() -> list[tuple[Tensor, Tensor, bool]]:
    whole = torch.zeros(4, 6)
    return [
        (whole, whole.t(), True),
        (whole[:, :3], whole[:, 3:], False),
        (whole[:, :3], whole[:, 2:], True),
        (whole[:, 0], whole[1, 1:], False),
        (whole[:, 0], whole[1, :1], True),
        (whole[::2], whole[1::2], False),
        (whole.view(-1)[::5], whole.view(-1)[::4], True),
        (whole[:0], whole, False),
        (whole.view(torch.int32)[2:], whole[:2], False),
        (whole.view(torch.int16)[:2], whole[:2], True),
    ]


@pytest.mark.parametrize(("one", "other", "expected"), cases())
def test_two_views_have_an_element_in_common(one: Tensor, other: Tensor, expected: bool) -> None:
    assert (overlap(one, other), overlap(other, one)) == (expected, expected)


ARMS = pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])


def bits(model: OneLayer) -> dict[str, bytes]:
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
    vars(source)["bits"] = lambda *_: np.zeros(24, np.uint16)


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
    vars(source)["bits"] = lambda *_: bits_of.copy()
    model.p.data.copy_(torch.from_numpy(bits_of.view(np.int16)).view(torch.bfloat16).view(4, 6))
    assert untouched(model, source).classes == {"w": "in_place"}


@pytest.mark.parametrize("at", range(0, 24, 5))
def test_a_large_tensor_is_read_in_parts(
    one_layer: Make, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded_checkpoint, "PIECE", 14)
    model, source = one_layer(PLANNED["copy"])
    assert untouched(model, source).classes == {"w": "in_place"}
    bits = model.p.data.view(torch.int16).view(-1)
    bits[at] ^= 1
    assert list(recorded(model, source).readback.changed) == ["w"]
    (write,) = again(source, recorded(model, source).placements).values()
    write()
    assert not recorded(model, source).readback.changed


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
        monkeypatch.setattr(torch_kernels, "on_host", lambda _: False)
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
@pytest.mark.parametrize(
    "shape",
    [
        Sharding(odd=tuple(ODD)),
        pytest.param(Sharding(tp=2, odd=tuple(ODD)), marks=pytest.mark.full),
    ],
)
def test_every_awkward_tensor_gets_the_class_it_should(
    shape: Sharding, tmp_path: Path, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not on_host:
        monkeypatch.setattr(torch_kernels, "on_host", lambda _: False)
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


@pytest.mark.parametrize("number", [1, 2, 3, 7, 21, 130])
def test_any_two_groups_are_loaded_without_each_other_in_a_few_loads(number: int) -> None:
    rows, columns = crossing(range(number))
    for loads, most in (list(separating(range(number))), 3), ([*rows, *columns], 2):
        for one, other in permutations(range(number), 2):
            assert any(one in some and other not in some for some in loads)
        assert 1 <= max(Counter(chain(*loads)).values()) <= most
        assert set(chain(*loads)) == set(range(number))
    assert set(chain(*rows)) == set(chain(*columns))
