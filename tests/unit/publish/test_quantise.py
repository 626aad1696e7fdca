import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from deltachain.errors import ChainMismatchError, ConfigError
from deltachain.publish import PublishConfig, Publisher, PublishReceipt
from deltachain.publish.model.layout import Box, ElementMap
from deltachain.publish.model.source import ModelTensors, Weight
from deltachain.publish.push import push
from deltachain.publish.quantise import recipe as grid
from deltachain.publish.quantise import tensors as amax
from deltachain.publish.quantise.compressed import INT8_ROW
from deltachain.publish.quantise.recipe import Recipe
from deltachain.publish.quantise.settings import RECIPES, Quantization
from deltachain.publish.quantise.tensors import quantise
from deltachain.publish.ranks.collectives import Ranks
from deltachain.store import open_store
from deltachain.torch_names import TORCH_DTYPES
from deltachain.types import TensorSpec
from tests.ranks.settings_trials import mixture
from tests.unit.publish.chains import Quantised
from tests.unit.publish.library import (
    BLOCKS,
    COMPRESSED,
    PRESETS,
    blocks,
    compressed,
    differing,
    llama,
    quantised_state,
    scheme,
)

NAME: Final = "layer.weight"

OTHER_WAYS: Final = [
    f"{name} by {way}"
    for name in sorted(RECIPES)
    if RECIPES.chosen(name).arithmetic.rounding
    for way in ("torch", "its library")
]

Make: TypeAlias = Callable[[tuple[int, int], torch.Generator], Tensor]


def normal(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator) * 0.02


def heavy(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """As trained weights are: rows of very different size, outliers, zeros of both signs."""
    values = normal(shape, generator) * torch.logspace(-3, 1, shape[0])[:, None]
    values[torch.rand(shape, generator=generator) < 0.001] *= 60
    values[torch.rand(shape, generator=generator) < 0.02] = 0.0
    values[torch.rand(shape, generator=generator) < 0.02] = -0.0
    return values


def fitting(recipe: Recipe, columns: int) -> int:
    """The number of columns, or the next one that the recipe takes."""
    return -(-columns // recipe.block[1]) * recipe.block[1] if recipe.whole_blocks else columns


def extreme(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """The largest and the smallest numbers, beside zeros; every block has a large one."""
    values = torch.zeros(shape)
    choice = torch.rand(shape, generator=generator)
    signs = torch.where(torch.rand(shape, generator=generator) < 0.5, -1.0, 1.0)
    values[choice < 0.3] = 1e-38
    values[choice < 0.2] = torch.finfo(torch.bfloat16).tiny / 8
    values[choice < 0.1] = torch.finfo(torch.bfloat16).max
    return values * signs


def zeros(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    values = normal(shape, generator)
    values[: shape[0] // 2] = 0
    return values


def ties(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Numbers of fp4 and of fp8, and those halfway between two; every block has the largest."""
    values = torch.randint(-48, 49, shape, generator=generator) / 8
    values[:, ::16] = 6.0
    return values


def every_bit(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Every finite bf16 number below 2, in any order."""
    bits = torch.arange(0x4000, dtype=torch.int16)
    both = torch.cat([bits, bits - 0x8000]).view(torch.bfloat16).float()
    at = torch.randint(0, both.numel(), shape, generator=generator)
    return both[at]


def library(recipe: Recipe, values: Tensor) -> dict[str, Tensor]:
    if recipe.name in BLOCKS:
        codes, scales = blocks(values, recipe.name)
        return {NAME: codes, f"{NAME}_scale_inv": scales}
    model = nn.Module()
    model.layer = nn.Linear(values.shape[1], values.shape[0], bias=False, dtype=values.dtype)
    model.layer.weight.data.copy_(values)
    return compressed(model, recipe.name, ())


def windows(
    shape: tuple[int, int], dice: random.Random, recipe: Recipe = INT8_ROW
) -> Iterator[Box]:
    """Boxes that tile a matrix, cut anywhere between stored codes."""
    cuts = [
        sorted({0, full, *(dice.randrange(full // by + 1) * by for _ in range(3))})
        for full, by in zip(shape, recipe.codes.block, strict=True)
    ]
    for top, bottom in zip(cuts[0], cuts[0][1:], strict=False):
        for left, right in zip(cuts[1], cuts[1][1:], strict=False):
            yield Box(shape, (top, left), (bottom - top, right - left))


def in_windows(recipe: Recipe, values: Tensor, boxes: list[Box]) -> dict[str, Tensor]:
    """Codes and scales of a matrix of which each window is a weight of its own."""
    wire = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[values.dtype]
    spec = TensorSpec(NAME, wire, tuple(values.shape))
    weights = []
    for number, box in enumerate(boxes):
        (top, left), (rows, columns) = box.offset, box.shape
        part = values[top : top + rows, left : left + columns].contiguous()
        live = TensorSpec(f"part {number}", wire, spec.shape)
        weights.append(Weight(live, part, frozen=False, element_map=ElementMap.straight(spec, box)))
    source = ModelTensors(
        tuple(weights), (spec,), {}, lambda: ((one.spec.name, one.tensor) for one in weights)
    )
    made = quantise(source, {NAME}, recipe, Ranks.alone())
    made.agree("test")
    whole = {one.name: np.zeros(one.numel, one.bits_dtype) for one in made.specs}
    for weight in made.live_weights():
        bits = weight.tensor.contiguous().view(-1).view(torch.uint8).numpy()
        (window,) = weight.element_map.windows(1 << 30)
        at = window.indices
        there = slice(at.start, at.stop) if isinstance(at, range) else at
        whole[window.spec.name][there] = bits.view(whole[window.spec.name].dtype)
    found = {}
    for one in made.specs:
        tensor = torch.from_numpy(whole[one.name].view(np.uint8)).view(TORCH_DTYPES[one.dtype])
        found[one.name] = tensor.view(one.shape)
    return found


@pytest.mark.parametrize("make", [normal, heavy, extreme, zeros, ties, every_bit])
@pytest.mark.parametrize("recipe", [*sorted(RECIPES), *OTHER_WAYS])
def test_windows_are_quantised_as_the_library_quantises_the_whole(
    recipe: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "BAND_NUMEL", 5000)  # several bands in a window
    monkeypatch.setattr(amax, "MESSAGE_NBYTES", 64)  # several messages
    name, _, way = recipe.partition(" by ")
    chosen = RECIPES.chosen(name)
    if way == "torch":
        monkeypatch.setattr(amax, "has_kernel", lambda _: False)
    elif way:
        chosen = replace(chosen, arithmetic=replace(chosen.arithmetic, rounding=None))
    for seed, (rows, columns) in enumerate([(300, 280), (128, 256), (77, 410), (1, 600), (257, 1)]):
        dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        shape = rows, fitting(chosen, columns)
        values = make(shape, generator).bfloat16()
        if recipe.startswith("mx"):
            values *= 0.25  # no exponent of 8 bits is that of the largest numbers
        expected = library(chosen, values)
        assert all(one.float().isfinite().all() for one in expected.values())
        whole = [Box.whole(shape)]
        assert differing(in_windows(chosen, values, whole), expected) == set(), shape
        parts = list(windows(shape, dice, chosen))
        assert differing(in_windows(chosen, values, parts), expected) == set(), parts


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_weights_of_other_dtypes(recipe: str, dtype: torch.dtype) -> None:
    chosen = RECIPES.chosen(recipe)
    shape = 200, fitting(chosen, 150)
    values = heavy(shape, torch.Generator().manual_seed(1)).to(dtype)
    parts = list(windows(shape, random.Random(1), chosen))
    assert differing(in_windows(chosen, values, parts), library(chosen, values)) == set()


@pytest.fixture
def pushed(tmp_path: Path) -> Quantised:
    """Another chain, for the same model from a folder."""
    return Quantised(tmp_path / "pushed")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return tmp_path / "saved"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("weight_scale_inv", torch.float32),
        ("weight_scale", torch.bfloat16),
        ("weight_scale", torch.float8_e8m0fnu),
        ("weight_scale", torch.uint8),  # compressed-tensors' MX formats
        ("gate_up_proj_scales", torch.uint8),  # gpt-oss
        ("scales.0", torch.float16),
        ("weight.absmax", torch.float32),  # bitsandbytes
        ("SCB", torch.float64),
    ],
)
def test_scale_of_a_checkpoint_that_others_quantised(
    name: str, dtype: torch.dtype, chain: Quantised, saved: Path
) -> None:
    saved.mkdir()
    sound = torch.full((2, 2), 1).to(dtype)
    spoilt = sound.clone()
    spoilt.view(torch.uint8)[-1, -dtype.itemsize :] = 0xFF  # NaN, in each of these dtypes
    changed = sound.clone()
    changed[0, 0] = 2

    def push_scales(scales: Tensor) -> int:
        codes = torch.zeros(256, 256).to(torch.float8_e4m3fn)
        save_file({"up.weight": codes, f"up.{name}": scales}, saved / "model.safetensors")
        return chain.push(saved, None).head.version

    why = f"'up.{name}' is a scale that is not finite"
    with pytest.raises(ConfigError, match=why):
        push_scales(spoilt)
    assert not list(open_store(chain.url).list())
    assert push_scales(sound) == 0
    with pytest.raises(ConfigError, match=why):
        push_scales(spoilt)
    assert push_scales(changed) == 1


def test_scale_that_is_not_finite_once_it_is_cast(tmp_path: Path) -> None:
    model, url = nn.Linear(8, 8), str(tmp_path / "chain")
    model.register_buffer("k_scale", torch.tensor(1e5))
    with pytest.raises(ConfigError, match="'k_scale' is a scale that is not finite"):
        Publisher(PublishConfig(url=url, dtype="F16")).attach(model)
    Publisher(PublishConfig(url=url, dtype="BF16")).attach(model).close()


def test_other_numbers_called_scales_are_published(chain: Quantised, saved: Path) -> None:
    """Not every tensor with such a name is a scale of floating point, by its last word."""
    tensors = {
        "scale_net.weight": torch.full((4,), float("inf")),
        "up.scales": torch.full((4,), 255, dtype=torch.uint8),  # codes of scales
        "up.weight_scale": torch.full((4,), 1e300, dtype=torch.float64),
    }
    saved.mkdir()
    save_file(tensors, saved / "model.safetensors")
    assert chain.push(saved, None).head.version == 0


def test_push_that_is_refused_leaves_no_chain(chain: Quantised, saved: Path) -> None:
    """Else another choice of layers, as the hint says, would be refused as another model."""
    model = llama()
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.down_proj.weight").fill_(1e-39)
    model.save_pretrained(saved)
    with pytest.raises(ConfigError, match="scale is not a positive finite number") as caught:
        chain.push(saved, "fp8-block")
    assert "ignore" in caught.value.hint
    assert not list(open_store(chain.url).list())
    without = Quantization("fp8-block", ignore=("lm_head", "model.layers.1.mlp.down_proj"))
    assert chain.push(saved, without).head.version == 0


def test_base_with_a_scale_that_is_not_finite_leaves_no_chain(tmp_path: Path) -> None:
    scales = torch.ones(4)
    save_file({"up.scales": scales}, tmp_path / "model.safetensors")
    scales[0] = float("inf")
    save_file({"up.scales": scales}, tmp_path / "base.safetensors")
    url = str(tmp_path / "chain")
    store, config = open_store(url), PublishConfig(url=url, base=tmp_path / "base.safetensors")
    with pytest.raises(ConfigError, match=r"'up\.scales' is a scale that is not finite"):
        push(store, tmp_path / "model.safetensors", config)
    assert not list(store.list())


def test_checkpoint_that_others_quantised_in_another_way(tmp_path: Path) -> None:
    """Blocks of 192 and of 128 have the same shapes here: only the configuration differs."""
    url, folder = str(tmp_path / "chain"), tmp_path / "model"
    store, config = open_store(url), PublishConfig(url=url)
    folder.mkdir()

    def pushed(scale: float, **settings: Any) -> int:
        tensors = {
            "up.weight": torch.zeros(256, 256).to(torch.float8_e4m3fn),
            "up.weight_scale_inv": torch.full((2, 2), scale),
        }
        save_file(tensors, folder / "model.safetensors")
        given = {"quant_method": "fp8", "weight_block_size": [128, 128], **settings}
        content = json.dumps({"model_type": "llama", "quantization_config": given})
        (folder / "config.json").write_text(content)
        return push(store, folder, config).head.version

    assert pushed(1.0, version="0.1") == 0
    with pytest.raises(ChainMismatchError, match=r"differs .* in 'weight_block_size'\s") as caught:
        pushed(2.0, weight_block_size=[192, 192])
    assert "another URL" in caught.value.hint
    assert pushed(2.0, version="0.2") == 1


def step_(model: nn.Module, seed: int, size: float = 5e-5) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator) * size
            parameter.add_(drawn.to(parameter.dtype))


def expected_of(model: nn.Module, recipe: str) -> dict[str, Tensor]:
    return quantised_state(copy.deepcopy(model).bfloat16(), recipe)


@pytest.mark.full
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_every_version_is_what_the_library_writes(recipe: str, chain: Quantised) -> None:
    model = llama().float()  # masters
    with chain.attach(model, recipe, dtype="BF16") as publisher:
        assert differing(chain.pulled(0), expected_of(model, recipe)) == set()
        for number in (1, 2):
            step_(model, number)
            before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            publisher.publish(step=number).result()
            assert differing(before, dict(model.state_dict())) == set(), "masters stay untouched"
            assert differing(chain.pulled(number), expected_of(model, recipe)) == set()


@pytest.mark.full
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_a_pushed_checkpoint_equals_a_published_model(
    recipe: str, chain: Quantised, saved: Path
) -> None:
    model = llama()
    for version, kind in enumerate(("anchor", "delta")):
        model.save_pretrained(saved)
        done = chain.push(saved, recipe)
        assert [one.manifest.edge.kind for one in done.committed] == [kind]
        assert differing(chain.pulled(version), expected_of(model, recipe)) == set()
        step_(model, 1)


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_configuration_names_the_recipe_and_what_it_leaves(recipe: str, chain: Quantised) -> None:
    chain.attach(llama(tie_word_embeddings=True), recipe).close()
    assert chain.ignored() == ["lm_head"]
    assert chain.table.ext == {"quantization": dict(RECIPES.chosen(recipe).record())}
    assert chain.table.aliases == {"lm_head.weight": "model.embed_tokens.weight"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", sorted(COMPRESSED | PRESETS))
def test_transformers_loads_what_is_pulled(recipe: str, chain: Quantised) -> None:
    model, twin = llama(), llama()
    chain.attach(model, recipe).close()
    chain.pulled()
    loaded = AutoModelForCausalLM.from_pretrained(chain.folder / "out-0", dtype=torch.bfloat16)
    tokens = torch.arange(12)[None]
    quantised_state(twin, recipe)
    near, _ = loaded(tokens).logits, twin(tokens)  # which makes both decompress their weights
    assert torch.cosine_similarity(near, model(tokens).logits, dim=-1).min() > 0.9
    assert differing(dense(loaded), dense(twin)) == set()
    weight = model.model.layers[0].mlp.up_proj.weight
    assert not torch.equal(dense(loaded)["model.layers.0.mlp.up_proj"], weight)


def dense(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: layer.weight.detach()
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    }


def test_a_publisher_continues_its_chain_without_an_anchor(chain: Quantised) -> None:
    model = llama()
    chain.attach(model, "fp8-block").close()
    step_(model, 1)
    with chain.attach(model, "fp8-block") as publisher:
        assert (publisher.version, publisher.last) == (2, None)
    assert differing(chain.pulled(2), expected_of(model, "fp8-block")) == set()


def test_layers_can_be_left_as_they_are(chain: Quantised) -> None:
    model = llama()
    chosen = Quantization("fp8-row", ignore=("lm_head", "o_proj", "re:model.layers.1.mlp"))
    chain.attach(model, chosen).close()
    ignored = tuple(
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and chosen.ignores(name)
    )
    assert len(ignored) == 1 + 2 + 3
    expected = quantised_state(copy.deepcopy(model), "fp8-row", ignored)
    assert differing(chain.pulled(), expected) == set()
    assert chain.ignored() == sorted(ignored)


@pytest.mark.parametrize("recipe", ["fp8-block", "int8-row", "nvfp4a16"])
def test_experts_are_quantised_one_by_one_and_routers_are_not(
    recipe: str, chain: Quantised, pushed: Quantised, saved: Path
) -> None:
    model = mixture().bfloat16()
    model.save_pretrained(saved)
    tensors = load_file(saved / "model.safetensors")
    layers = {name.removesuffix(".weight"): one for name, one in tensors.items() if one.ndim == 2}
    kept = {"lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"}
    assert sum(".experts." in name for name in layers) == 3 * 3
    twin = nn.ModuleDict()  # the same matrices as linear layers
    for name, weight in layers.items():
        if name not in kept:
            rows, columns = weight.shape
            linear = nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16)
            linear.weight.data.copy_(weight)
            twin[name.replace(".", "/")] = linear
    quantised = quantised_state(twin, recipe)
    whole = {name: one for name, one in tensors.items() if name.removesuffix(".weight") in kept}
    whole |= {name: one for name, one in tensors.items() if one.ndim != 2}
    expected = whole | {name.replace("/", "."): one for name, one in quantised.items()}
    chain.attach(model, recipe).close()
    assert differing(chain.pulled(), expected) == set()
    assert chain.ignored() == ["lm_head", "model.layers.0.mlp.gate"]
    pushed.push(saved, recipe)
    assert differing(pushed.pulled(), expected) == set()
    assert pushed.table.tensors == chain.table.tensors


def test_an_export_is_quantised_by_its_configuration(chain: Quantised, saved: Path) -> None:
    model = llama()
    model.save_pretrained(saved)

    def export() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in model.state_dict().items():
            yield name, tensor.clone()

    with chain.attach(export, "int8-row", assets=saved) as publisher:
        step_(model, 1)
        publisher.publish(step=1).result()
    assert differing(chain.pulled(1), expected_of(model, "int8-row")) == set()


def test_a_pushed_output_layer_that_is_tied_is_left_by_name(chain: Quantised, saved: Path) -> None:
    llama(tie_word_embeddings=True).save_pretrained(saved)  # without lm_head.weight
    chain.push(saved, "fp8-row")
    assert chain.ignored() == ["lm_head"]


def test_a_scale_that_moves_changes_its_block_alone(chain: Quantised) -> None:
    model = nn.Linear(512, 640, bias=False)  # its weight is called `weight`
    receipt, where = differences(chain, "fp8-block", model, (200, 300), 0.75)
    assert where["weight_scale_inv"] == [[1, 2]]  # of rows 128 to 255, columns 256 to 383
    assert {(row // 128, column // 128) for row, column in where["weight"]} == {(1, 2)}
    assert len(where["weight"]) > 0.9 * 128 * 128, "dense there"
    assert receipt.nnz == len(where["weight"]) + 1


WIDTHS: Final = {"mxfp4": 32, "nvfp4a16": 16}
"""Columns that share a scale."""


def linear() -> nn.Linear:
    """A layer whose largest weight, by far, is the first."""
    torch.manual_seed(0)
    model = nn.Linear(96, 40, bias=False)
    with torch.no_grad():
        model.weight[0, 0] = 3.0
    return model


def differences(
    chain: Quantised, recipe: str, model: nn.Linear, at: tuple[int, int], change: float
) -> tuple[PublishReceipt, dict[str, list[list[int]]]]:
    """Publish a change of one weight: where each tensor of the version changed, by its bits."""
    with chain.attach(model, recipe, dtype="BF16") as publisher:
        with torch.no_grad():
            model.weight[at] = change
        receipt = publisher.publish(step=1).result()
    assert receipt.kind == "delta"
    before, after = chain.pulled(0), chain.pulled(1)

    def bits(tensor: Tensor) -> Tensor:
        return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor.view(torch.int32)

    where = {name: (bits(before[name]) != bits(after[name])).nonzero().tolist() for name in before}
    return receipt, {name: at for name, at in where.items() if at}


@pytest.mark.parametrize("recipe", sorted(WIDTHS))
def test_a_weight_that_changes_changes_its_byte_alone(recipe: str, chain: Quantised) -> None:
    model = linear()
    with torch.no_grad():
        model.weight[3, 40:48] = 0.1  # as large as any of its block
    receipt, where = differences(chain, recipe, model, (3, 41), -0.1)
    assert where == {"weight_packed": [[3, 20]]}
    assert receipt.nnz == 1
    before, after = (int(chain.pulled(n)["weight_packed"][3, 20]) for n in (0, 1))
    assert before ^ after == 0x80, "the sign of the second column"


@pytest.mark.parametrize("recipe", sorted(WIDTHS))
def test_a_scale_that_moves_changes_its_packed_block_alone(recipe: str, chain: Quantised) -> None:
    width = WIDTHS[recipe]
    receipt, where = differences(chain, recipe, linear(), (3, 41), 1.5)
    assert where.keys() == {"weight_packed", "weight_scale"}
    assert where["weight_scale"] == [[3, 41 // width]]
    first = 41 // width * width // 2
    assert {row for row, _ in where["weight_packed"]} == {3}
    assert {column for _, column in where["weight_packed"]} <= set(range(first, first + width // 2))
    assert receipt.nnz == len(where["weight_packed"]) + 1


def test_a_largest_weight_that_moves_changes_the_global_scale(chain: Quantised) -> None:
    _, where = differences(chain, "nvfp4a16", linear(), (3, 41), 5.0)
    assert where["weight_global_scale"] == [[0]]
    assert len(where["weight_scale"]) > 100  # those of other blocks follow it


def test_matrices_that_engines_load_into_one_have_one_global_scale(chain: Quantised) -> None:
    model = llama()
    with chain.attach(model, "nvfp4a16") as publisher:
        with torch.no_grad():
            model.model.layers[1].self_attn.k_proj.weight[0, 0] = 2.0
        publisher.publish(step=1).result()
    first, second = chain.pulled(0), chain.pulled(1)

    def scale(version: dict[str, Tensor], name: str) -> float:
        return float(version[f"model.layers.1.{name}_proj.weight_global_scale"])

    for block, group in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
        names = [f"{block}.{name}" for name in group]
        for version in (first, second):
            assert len({scale(version, name) for name in names}) == 1
            assert scale(version, names[0]) != scale(version, "mlp.down")
        moved = [scale(first, name) != scale(second, name) for name in names]
        assert moved == [block == "self_attn"] * len(group)
    assert scale(second, "self_attn.v") == 448 * 6 / 2.0


@pytest.mark.parametrize("recipe", sorted(PRESETS))
def test_the_configuration_is_that_of_the_library(recipe: str, chain: Quantised) -> None:
    chosen = scheme(recipe)
    chain.attach(llama(), recipe).close()
    expected = QuantizationConfig(
        config_groups={"group_0": chosen},
        format=chosen.format,
        quantization_status="compressed",
        ignore=["lm_head"],
    )
    found = QuantizationConfig.model_validate(chain.config())
    assert found.model_dump() == expected.model_dump()


def test_tied_layers_have_tied_tensors(chain: Quantised) -> None:
    model = nn.ModuleDict({name: nn.Linear(32, 30, bias=False) for name in ("a", "b")})
    model["b"].weight = model["a"].weight
    chain.attach(model, "nvfp4a16", dtype="BF16").close()
    names = ("weight_packed", "weight_scale", "weight_global_scale")
    assert chain.table.aliases == {f"b.{name}": f"a.{name}" for name in names}
    assert {one.name: (one.dtype, one.shape) for one in chain.table.specs()} == {
        "a.weight_packed": ("U8", (30, 16)),
        "a.weight_scale": ("F8_E4M3", (30, 2)),
        "a.weight_global_scale": ("F32", (1,)),
    }


# What is refused


@pytest.mark.parametrize("recipe", sorted(PRESETS))
def test_a_matrix_that_ends_within_a_block_is_refused(
    recipe: str, chain: Quantised, saved: Path
) -> None:
    model = llama(intermediate_size=200)
    model.save_pretrained(saved)
    for refused in (lambda: chain.attach(model, recipe), lambda: chain.push(saved, recipe)):
        with pytest.raises(ConfigError, match=r"down_proj\.weight' has 200 columns") as caught:
            refused()
        assert "leave its layer out" in caught.value.hint
        assert not list(chain.folder.rglob("chain.json"))


@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp8"])
def test_a_scale_that_no_exponent_of_8_bits_has_is_refused(recipe: str, chain: Quantised) -> None:
    model = linear()
    with chain.attach(model, recipe, dtype="BF16") as publisher:
        with torch.no_grad():
            model.weight[7, 9] = torch.finfo(torch.bfloat16).max
        with pytest.raises(ConfigError, match="'weight': a scale is not a positive finite number"):
            publisher.publish(step=1)
        assert publisher.version == 0
        with torch.no_grad():
            model.weight[7, 9] = 0.5
        assert publisher.publish(step=2).result().version == 1


def test_a_weight_beside_one_that_is_not_finite_is_not_blamed(chain: Quantised) -> None:
    model = llama()
    weight = model.model.layers[0].self_attn.q_proj.weight
    with chain.attach(model, "nvfp4a16") as publisher:
        with torch.no_grad():  # k_proj is quantised before it, and shares its global scale
            weight[1, 1] = float("inf")
        with pytest.raises(ConfigError, match=r"self_attn\.q_proj\.weight' has values that are no"):
            publisher.publish(step=1)
        assert publisher.version == 0
        with torch.no_grad():
            weight[1, 1] = 0.5
        assert publisher.publish(step=2).result().version == 1
