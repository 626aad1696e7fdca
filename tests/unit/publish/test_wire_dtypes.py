import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    GroupWeightRename,
    MergeModulelist,
    Transpose,
    WeightConverter,
    revert_weight_conversion,
)

from deltachain.errors import ConfigError
from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.model import conversion
from deltachain.publish.model.assets import collect_assets
from deltachain.publish.model.layout import NUMBER_BIT, RUNS, Box, ElementMap, ElementRun
from deltachain.publish.model.source import ModelTensors, collect_weights
from deltachain.publish.model.wire_dtypes import wire_dtype
from deltachain.publish.quantise import tensors
from deltachain.publish.quantise.recipe import Grid, Recipe
from deltachain.publish.quantise.settings import RECIPES
from deltachain.publish.quantise.tensors import make_codes
from deltachain.publish.snapshot import wire_bits
from deltachain.store import MemoryStore
from deltachain.types import Indices, TensorSpec
from tests.support.models import TinyModel, bits_of, plain_model, recompute, same, train_
from tests.unit.publish.chains import Attach
from tests.unit.publish.test_source import dtypes, folder_of

TINY: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def moe() -> PreTrainedModel:
    extra: dict[str, Any] = {"moe_intermediate_size": 12, "num_experts": 3}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**TINY, **extra, num_experts_per_tok=2))


def renamed() -> PreTrainedModel:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    config = GPTNeoXConfig(**{n: TINY[n] for n in names}, num_attention_heads=2)
    return GPTNeoXForCausalLM(config)


def transposed() -> Any:
    """One whose checkpoint has a layer the other way round."""
    model: Any = Qwen3ForCausalLM(Qwen3Config(**TINY))
    turn = WeightConverter("mlp.up_proj.turned", "mlp.up_proj.weight", [Transpose(0, 1)])
    model._weight_conversions = [turn]
    return model


def joined() -> Any:
    """One whose checkpoint has queries, keys and values in one tensor."""
    model: Any = Qwen3ForCausalLM(Qwen3Config(**TINY | {"num_key_value_heads": 2}))
    parts = [f"self_attn.{kind}_proj.weight" for kind in "qkv"]
    model._weight_conversions = [WeightConverter("self_attn.qkv.weight", parts, [Chunk(dim=0)])]
    return model


def shifted() -> Any:
    """One that names a norm as its checkpoint names another, and only if the other is there."""
    model: Any = Qwen3ForCausalLM(Qwen3Config(**TINY))
    there = ["a_layernorm", "input_layernorm"]
    model._weight_conversions = [
        GroupWeightRename(there, ["input_layernorm", "post_attention_layernorm"])
    ]
    return model


def as_checkpoint(source: ModelTensors) -> dict[str, bytes]:
    """What a follower would write: every tensor put together from windows."""
    found = {spec.name: bytearray(spec.nbytes) for spec in source.specs}
    for weight in source.live_weights():
        bits = wire_bits(weight)
        for spec, select, indices in weight.element_map.windows(7):
            view = np.frombuffer(found[spec.name], bits.dtype)
            view[np.asarray(indices)] = bits[select]
    return {name: bytes(data) for name, data in found.items()}


@pytest.mark.parametrize("make", [moe, renamed, transposed, joined, shifted])
def test_the_checkpoint_is_what_save_pretrained_writes(make: object) -> None:
    model = make()  # type: ignore[operator]
    for number, parameter in enumerate(model.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    plain = {name: p.detach() for name, p in model.named_parameters()}
    expected = revert_weight_conversion(model, plain)
    source = collect_weights(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    assert {spec.name: spec.shape for spec in source.specs} == shapes
    truth = {name: bits_of({name: t})[name].tobytes() for name, t in expected.items()}
    assert as_checkpoint(source) == truth


def test_layers_of_one_shape_share_their_tables() -> None:
    tables = {
        id(w.element_map.axes)
        for w in collect_weights(transposed()).weights
        if "up_proj" in w.spec.name
    }
    assert len(tables) == 1


@pytest.mark.parametrize("turn", [[], [Transpose(1, 2)]])
def test_a_conversion_takes_no_memory_for_its_elements(turn: list[ConversionOps]) -> None:
    extra: dict[str, Any] = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128}
    with torch.device("meta"):
        model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**TINY | extra, num_experts_per_tok=2))
    parts = [f"mlp.experts.*.{kind}_proj.weight" for kind in ("gate", "up")]
    model._weight_conversions = [
        WeightConverter(
            parts, "mlp.experts.gate_up_proj", [MergeModulelist(0), Concatenate(1), *turn]
        )
    ]
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    turned = {n: (s[0], s[2], s[1]) for n, s in shapes.items() if turn and "gate_up" in n}
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak so far
    before = _resident("VmHWM")
    found = conversion.conversions(model, shapes | turned)
    largest = max(map(math.prod, shapes.values()))
    assert _resident("VmHWM") - before < largest
    tables = [axis for one in found.values() for axis in one.axes or ()]
    assert sum(axis.size for axis in tables) < largest // 1000
    assert bool(tables) == bool(turn)


def _resident(field: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.partition(f"{field}:")[2].split()[0])


class Chain(NamedTuple):
    """Operations in place of a model's conversion."""

    steps: list[Callable[[list[Tensor]], list[Tensor]]]

    def convert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        made = list(tensors.values())
        for step in self.steps:
            made = step(made)
        return {str(number): tensor for number, tensor in enumerate(made)}


def _step(
    draw: Callable[[st.SearchStrategy[Any]], Any], tensors: list[Tensor]
) -> Callable[[list[Tensor]], list[Tensor]]:
    """An operation that the first of some tensors, or all, can take."""
    first = tensors[0]
    one, other = (draw(st.integers(0, first.ndim - 1)) for _ in range(2))
    size, parts = first.shape[one], draw(st.integers(1, 3))
    split = list(first.shape)
    split[one : one + 1] = [2, size // 2]
    steps: list[Callable[[Tensor], Sequence[Tensor]]] = [
        lambda t: [t.transpose(one, other).contiguous()],
        lambda t: t.chunk(parts, one),
        lambda t: [t.movedim(one, 0)[0::2], t.movedim(one, 0)[1::2]] if size > 1 else [t],
        lambda t: t.split([1, size - 1], one) if size > 1 else [t],
        lambda t: t.unbind(one) if t.ndim > 1 else [t],
        lambda t: [t.flatten(min(one, other), max(one, other))],
        lambda t: (
            [t.reshape(split).transpose(one, one + 1).reshape(t.shape)] if size % 2 < 1 else [t]
        ),
        lambda t: [t.flip(one)],
        lambda t: [t, t[:1]],
    ]
    alike = [t for t in tensors if t.shape == first.shape]
    if len(alike) == len(tensors) > 1 and draw(st.booleans()):
        join = draw(st.sampled_from([torch.cat, torch.stack]))
        return lambda tensors: [join(tensors, one)]
    step = draw(st.sampled_from(steps))
    return lambda tensors: [*tensors[1:], *step(tensors[0])]


@given(st.data())
def test_a_conversion_is_what_its_operations_do_to_elements(data: st.DataObject) -> None:
    """Or it is refused: elements are added or left out."""
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)))
    shapes = dict.fromkeys(data.draw(st.sampled_from(["a", "ab"])), shape)
    tensors = [
        torch.arange(math.prod(shape)).view(shape) + (n << NUMBER_BIT) for n in range(len(shapes))
    ]
    chain, made = Chain([]), list(tensors)
    for _ in range(data.draw(st.integers(1, 5))):
        chain.steps.append(_step(data.draw, made))
        made = chain.steps[-1](made)
    there = {str(number): tensor.reshape(-1).numpy() for number, tensor in enumerate(made)}
    everything = np.sort(np.concatenate(list(there.values())))
    if not np.array_equal(everything, torch.cat([t.reshape(-1) for t in tensors]).numpy()):
        with pytest.raises(ConfigError, match="computed anew"):
            conversion._measured(chain, shapes)  # type: ignore[arg-type]
        return
    numel = math.prod(shape)
    low = data.draw(st.integers(0, numel - 1))
    run = Box((numel,), (low,), (data.draw(st.integers(1, numel - low)),))  # of a flat shard
    for number, found in enumerate(conversion._measured(chain, shapes)):  # type: ignore[arg-type]
        slots = [ElementRun(TensorSpec(t.name, "BF16", t.shape), *t[2:]) for t in found.targets]
        for box, first in ((Box.whole(shape), 0), (run, low)):
            element_map = ElementMap(box, tuple(slots), found.axes)
            everything = np.arange(box.numel)
            for split in (element_map.split(everything), element_map.windows(5)):
                moved = [(there[s.name][np.asarray(at)], everything[held]) for s, held, at in split]
                codes, live = (np.concatenate(both) for both in zip(*moved, strict=True))
                assert np.array_equal(codes, live + first + (number << NUMBER_BIT))
                assert np.array_equal(np.sort(live), everything)


def test_converted_tensors_whose_names_depend_on_others_are_refused() -> None:
    model: Any = Qwen3ForCausalLM(Qwen3Config(**TINY))
    model._weight_conversions = [
        GroupWeightRename(["mlp.a_proj", "mlp.down_proj"], ["mlp.down_proj", "mlp.gate_proj"]),
        WeightConverter("mlp.gate_proj.turned", "mlp.gate_proj.weight", [Transpose(0, 1)]),
    ]
    with pytest.raises(ConfigError, match=r"down_proj\.turned.*were found instead"):
        collect_weights(model)


def test_values_that_are_computed_when_saving_are_refused() -> None:
    class Doubled(Transpose):
        @property
        def reverse_op(self) -> "Doubled":
            return self

        def convert(self, input_dict: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
            (name, tensors), *_ = input_dict.items()
            tensor = tensors[0] if isinstance(tensors, list) else tensors
            return {name: tensor * 2}

    model: Any = Qwen3ForCausalLM(Qwen3Config(**TINY))
    model._weight_conversions = [
        WeightConverter("mlp.up_proj.weight", "mlp.up_proj.weight", [Doubled(0, 1)])
    ]
    with pytest.raises(ConfigError, match="computed anew"):
        collect_weights(model)


def both(recipe: Recipe, values: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of a whole matrix by the kernel and by the library, as bytes; torch has the same."""
    grid, window = Grid((values.shape[0], values.shape[1]), recipe.block), Box.whole(values.shape)
    ours = make_codes(recipe, values, grid, window, amax)
    library = make_codes(by_library(recipe), values, grid, window, amax)
    assert ours.dtype == library.dtype
    with mock.patch.object(tensors, "has_kernel", return_value=False):
        in_torch = make_codes(recipe, values, grid, window, amax)
    assert torch.equal(in_torch.view(torch.uint8), ours.view(torch.uint8))
    return ours.view(torch.uint8), library.view(torch.uint8)


def by_library(recipe: Recipe) -> Recipe:
    return replace(recipe, arithmetic=replace(recipe.arithmetic, rounding=None))


def every_number() -> Tensor:
    """Every finite bf16 number, ascending in magnitude, by turns of both signs."""
    positive = torch.arange(0x7F80, dtype=torch.int32)
    both = torch.stack([positive, positive - 0x8000], 1).flatten().to(torch.int16)
    return both.view(torch.bfloat16)


@pytest.mark.parametrize("recipe", ["int8-row", "fp8-row"])
def test_every_number_under_many_scales_of_rows(recipe: str) -> None:
    numbers = every_number()
    rows = numbers[513::97, None].abs()
    values = numbers[None].expand(rows.shape[0], -1)
    values = torch.where(values.abs() <= rows, values, torch.tensor(0.0, dtype=torch.bfloat16))
    for part in torch.arange(rows.shape[0]).split(64):
        ours, library = both(RECIPES.chosen(recipe), values[part].contiguous(), rows[part])
        assert torch.equal(ours, library)


@pytest.mark.parametrize("recipe", ["fp8-block", "fp8-block-ue8m0", "fp8-tensor"])
def test_every_number_under_many_scales_of_blocks(recipe: str) -> None:
    numbers = every_number()
    chosen = RECIPES.chosen(recipe)
    for bound in numbers[2049::1531].abs():
        below = numbers[numbers.abs() <= bound]
        at = torch.randint(0, below.numel(), (128, 128), generator=torch.Generator().manual_seed(1))
        values = below[at].contiguous()
        values[0, 0] = bound
        amax = bound.view(1, 1)
        if not chosen.arithmetic.factors(amax, chosen.arithmetic.scales(amax)).isfinite().all():
            continue  # refused before
        ours, library = both(chosen, values, amax)
        assert torch.equal(ours, library), float(bound)


def truth(box: Box) -> Indices:
    """Flat indices of a box, by slicing."""
    everything = np.arange(math.prod(box.full)).reshape(box.full)
    cut = tuple(slice(at, at + n) for at, n in zip(box.offset, box.shape, strict=True))
    return everything[cut].reshape(-1)


def fused(experts: int, rows: int, width: int) -> tuple[ElementRun, ...]:
    """Experts that a model has in one tensor, gate over up, and a checkpoint one by one."""
    slots, numel = [], rows * width
    for expert, (number, name) in product(range(experts), enumerate(("gate", "up"))):
        spec = TensorSpec(f"{expert}.{name}", "BF16", (rows, width))
        slots.append(ElementRun(spec, (2 * expert + number) * numel, 0, numel))
    return tuple(slots)


@st.composite
def element_maps(draw: st.DrawFn) -> tuple[ElementMap, dict[str, Indices]]:
    """A map, and by tensor of the checkpoint which element of the live one each element is."""
    experts, rows, width = (draw(st.integers(1, 4)) for _ in range(3))
    full = (experts, 2 * rows, width)
    offset = tuple(draw(st.integers(0, size)) for size in full)
    shape = tuple(draw(st.integers(0, size - at)) for size, at in zip(full, offset, strict=True))
    box, live = Box(full, offset, shape), np.arange(math.prod(full)).reshape(full)
    slots = fused(experts, rows, width)
    if draw(st.booleans()):
        there = {s.spec.name: live.reshape(-1)[s.start : s.start + s.numel] for s in slots}
        return ElementMap(box, slots), there
    # Gate and up alternate, and are transposed.
    halves = {0: live[:, 0::2].transpose(0, 2, 1), 1: live[:, 1::2].transpose(0, 2, 1)}
    there, table = {}, np.empty(live.size, np.int64)
    for number, slot in enumerate(slots):
        there[slot.spec.name] = halves[number % 2][number // 2].reshape(-1)
        table[there[slot.spec.name]] = np.arange(slot.numel) + (number << NUMBER_BIT)
    if draw(st.booleans()):
        return ElementMap(box, slots, (table,)), there
    row = np.arange(2 * rows)
    numbers = np.arange(experts) * 2 << NUMBER_BIT, (row % 2 << NUMBER_BIT) + row // 2
    return ElementMap(box, slots, (*numbers, np.arange(width) * rows)), there


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    full = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    offset = tuple(draw(st.integers(0, size)) for size in full)
    shape = tuple(draw(st.integers(0, size - at)) for size, at in zip(full, offset, strict=True))
    return Box(full, offset, shape)


@given(boxes())
def test_elements_of_a_box_are_those_of_a_slice(box: Box) -> None:
    """All of them, those before an index, and neighbours."""
    indices = truth(box)
    if box.numel:
        assert box.flat(np.arange(box.numel)).tolist() == indices.tolist()
    for index in range(math.prod(box.full) + 1):
        assert box.before(index) == np.searchsorted(indices, index)
    for start in range(0, indices.size, box.run) if box.numel else ():
        assert set(np.diff(indices[start : start + box.run])) <= {1}


@given(element_maps(), st.randoms(use_true_random=False))
def test_changes_go_where_the_checkpoint_has_them(
    map_and_truth: tuple[ElementMap, dict[str, Indices]], random: object
) -> None:
    element_map, there = map_and_truth
    held = truth(element_map.box)
    local = np.array([i for i in range(held.size) if random.random() < 0.5], np.int64)  # type: ignore[attr-defined]
    found = []
    for spec, select, indices in element_map.split(local):
        assert (np.diff(indices) > 0).all()
        assert held[local[select]].tolist() == there[spec.name][indices].tolist()
        found += local[select].tolist()
    assert sorted(found) == local.tolist()


@given(element_maps(), st.integers(1, 9))
def test_windows_are_everything_once(
    map_and_truth: tuple[ElementMap, dict[str, Indices]], limit: int
) -> None:
    element_map, there = map_and_truth
    held, found = truth(element_map.box), []
    for spec, select, indices in element_map.windows(limit):
        places = np.asarray(indices)
        assert places.size <= limit
        assert (np.diff(places) > 0).all()
        assert held[select].tolist() == there[spec.name][places].tolist()
        found += np.arange(held.size)[select].tolist()
    assert sorted(found) == list(range(held.size))


def test_a_window_is_in_few_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RUNS > 1
    monkeypatch.setattr("deltachain.publish.model.layout.RUNS", 3)
    spec = TensorSpec("w", "BF16", (8, 8))
    columns = ElementMap.straight(spec, Box((8, 8), (0, 2), (8, 2)))
    assert [len(window.indices) for window in columns.windows(1000)] == [6, 6, 4]


def test_what_is_held_whole_is_found() -> None:
    slots = fused(3, 4, 5)
    rows = ElementMap(Box((3, 8, 5), (1, 0, 0), (2, 8, 5)), slots)
    assert rows.all_of(slots[0].spec) is None
    assert rows.all_of(slots[2].spec) == slice(0, 20)
    assert rows.all_of(slots[5].spec) == slice(60, 80)
    columns = ElementMap(Box((3, 8, 5), (0, 0, 0), (3, 8, 4)), slots)
    assert all(columns.all_of(slot.spec) is None for slot in slots)


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def saved_as(dtype: torch.dtype, folder: Path) -> Path:
    """A checkpoint of the plain model."""
    return folder_of(plain_model(dtype=dtype).state_dict(), folder)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="no wire form"):
        collect_weights(plain_model(), dtype="bfloat16")


@pytest.mark.parametrize(("model", "saved"), [(BF16, F16), (F16, BF16), (BF16, F32)])
def test_weights_are_not_published_in_a_dtype_that_cannot_be_meant_unless_asked(
    tmp_path: Path, model: torch.dtype, saved: torch.dtype
) -> None:
    """Neither fp16 as bf16, nor the reverse, nor in a wider one."""
    folder, trained = saved_as(saved, tmp_path), plain_model(dtype=model)
    names = {BF16: "BF16", F16: "F16", F32: "F32"}
    why = f"{names[model]} in the model and {names[saved]} in its checkpoint"
    with pytest.raises(ConfigError, match=why) as caught:
        collect_weights(trained, checkpoint=folder)
    assert f"dtype='{names[model]}' publishes what is trained" in caught.value.hint
    asked = collect_weights(trained, checkpoint=folder, dtype="F16")
    assert {spec.dtype for spec in asked.specs} == {"F16"}


@pytest.mark.parametrize("dtype", ["F16", "F8_E4M3"])
def test_a_finite_weight_is_never_published_as_infinite(dtype: str) -> None:
    model, store = plain_model(), MemoryStore()
    config = PublishConfig(url="memory://x", dtype=dtype)
    with Publisher(config, store=store).attach(model) as publisher:
        with torch.no_grad():
            next(model.parameters()).fill_(1e5)
        with pytest.raises(ConfigError, match="which " + dtype + " cannot have") as caught:
            publisher.publish()
        assert "BF16" in caught.value.hint
        with torch.no_grad():
            next(model.parameters()).fill_(float("inf"))  # as it was trained
        assert publisher.publish().result().version == 1
    other = MemoryStore()
    with torch.no_grad():
        next(model.parameters()).fill_(1e5)
    with pytest.raises(ConfigError, match="cannot have"):
        Publisher(config, store=other).attach(model)
    assert not list(other.list(""))


def test_weights_that_a_given_dtype_rounds_beside_others_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = plain_model()
    model[1].float()
    collect_weights(model, dtype="BF16")
    assert "rounds 2 weights" in caplog.text
    assert "'1.bias'" in caplog.text
    caplog.clear()
    folder = folder_of(model.state_dict(), tmp_path / "mixed")
    collect_weights(model.float(), dtype="BF16", checkpoint=folder)
    assert "rounds 2 weights" in caplog.text
    caplog.clear()
    collect_weights(model, dtype="BF16")
    tensors = {"up": torch.zeros(2, dtype=BF16), "router.bias": torch.zeros(2)}
    collect_weights(tensors.items)
    assert not caplog.text
    collect_weights(tensors.items, dtype="BF16")
    assert "rounds 1 weights" in caplog.text
    assert "'router.bias'" in caplog.text


def test_dtypes_of_single_tensors_differ_as_in_the_checkpoint(tmp_path: Path) -> None:
    tensors = plain_model().state_dict()
    tensors["1.bias"] = tensors["1.bias"].float()
    folder = folder_of(tensors, tmp_path / "mix")
    source = collect_weights(plain_model(dtype=F32), checkpoint=folder)
    assert {w.spec.name for w in source.weights if w.spec.dtype == "F32"} == {"1.bias"}


def test_a_folder_of_other_files_says_nothing_about_dtypes(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    assert set(dtypes(plain_model(), checkpoint=tmp_path).values()) == {"BF16"}  # type: ignore[arg-type]


def test_a_checkpoint_that_cannot_be_read_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved_as(F16, tmp_path / "fp16")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    collect_weights(plain_model(), checkpoint=folder)
    unknown = "the dtypes of the checkpoint that the model was loaded from are not known"
    assert unknown in caplog.text


@pytest.mark.parametrize("asked", ["F16", None])
def test_a_wire_dtype_of_a_narrower_range_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, asked: str | None
) -> None:
    folder = saved_as(F16, tmp_path)
    collect_weights(plain_model(dtype=F32), dtype=asked, checkpoint=folder)
    assert "published as F16, in which values below 3e-08 become zero" in caplog.text


def test_a_dtype_given_outright_wins_for_floats_and_leaves_integers(tmp_path: Path) -> None:
    model = TinyModel()
    model.config = SimpleNamespace(_name_or_path=str(tmp_path))  # type: ignore[assignment]
    assert set(dtypes(model, dtype="BF16").values()) == {"BF16", "I64"}


def test_fp32_masters_are_rounded_to_nearest_even(attach: Attach, store: MemoryStore) -> None:
    """Updates below half a step of bf16 are not published."""
    model = plain_model(dtype=F32)
    publisher = attach(model, dtype="BF16")
    train_(model, 1, share=0.1)
    publisher.publish().result()
    bf16 = {name: tensor.to(BF16) for name, tensor in model.state_dict().items()}
    assert same(recompute(store)[1].state, bits_of(bf16))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(BF16).float())
            parameter.view(-1).view(torch.int32).add_(1)
    assert publisher.publish().result().nnz == 0


def test_what_a_checkpoint_has_in_two_dtypes_is_not_guessed() -> None:
    wire = {"gate": "BF16", "up": "F32"}
    with pytest.raises(ConfigError, match="tensors fused with it") as caught:
        wire_dtype(["gate", "up"], torch.zeros(2), None, wire)
    assert "dtype=" in caught.value.hint


def test_a_dequantised_model_is_published_in_its_own_dtypes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    codes = {name: one.float() for name, one in plain_model().state_dict().items()}
    codes["0.weight"] = codes["0.weight"].to(torch.float8_e4m3fn)
    codes["0.weight_scale_inv"] = torch.ones(1, 1)
    folder = folder_of(codes, tmp_path / "fp8")
    assert set(dtypes(plain_model(), checkpoint=folder).values()) == {"BF16"}  # type: ignore[arg-type]
    assert "1 weights such as '0.weight' are F8_E4M3 in the checkpoint" in caplog.text
    caplog.clear()
    collect_weights(plain_model(), checkpoint=folder, dtype="BF16")
    assert "F8_E4M3" not in caplog.text
    masters = plain_model(dtype=torch.float32)
    assert set(dtypes(masters, checkpoint=folder).values()) == {"F32"}  # type: ignore[arg-type]
    quantised = nn.Sequential(nn.Linear(2, 2, bias=False).to(torch.float8_e4m3fn))
    folder_of(quantised.state_dict(), folder)
    caplog.clear()
    assert set(dtypes(quantised, checkpoint=folder).values()) == {"F8_E4M3"}  # type: ignore[arg-type]
    assert not caplog.text


def of_bf16(model: nn.Module, folder: Path) -> nn.Module:
    """Return a model whose origin has its weights in bf16."""
    folder_of({name: one.bfloat16() for name, one in model.state_dict().items()}, folder)
    model.config = SimpleNamespace(_name_or_path=str(folder))  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("name", ["_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", None])
def test_what_a_class_keeps_in_fp32_is_published_so_and_other_such_weights_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str | None
) -> None:
    model: Any = of_bf16(plain_model(), tmp_path / "bf16")
    model[1].float()
    if name is not None:
        setattr(model, name, {"1.we*ht"})
    kept = {"1.weight"} if name else set()
    assert {one for one, dtype in dtypes(model).items() if dtype == "F32"} == kept
    assert f"{2 - len(kept)} weights such as '1.bias' are rounded to BF16" in caplog.text
    assert "dtype='model'" in caplog.text
    caplog.clear()
    own = dtypes(model, dtype="model")
    assert {one for one, dtype in own.items() if dtype == "F32"} == {"1.bias", "1.weight"}
    assert set(dtypes(model.float()).values()) == {"BF16"}  # masters
    assert not caplog.text


def test_a_wrapped_model_keeps_its_dtypes_and_its_configuration(tmp_path: Path) -> None:
    Qwen3ForCausalLM(Qwen3Config(**TINY)).bfloat16().save_pretrained(tmp_path)
    model = Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=F32)
    wrapped = nn.DataParallel(model)
    assert {spec.dtype for spec in collect_weights(wrapped).specs} == {"BF16"}
    assert collect_weights(wrapped).specs == collect_weights(model).specs
    assert "config.json" in collect_assets(wrapped, PublishConfig(url="memory://x"))
