"""Recipes whose codes share bytes, and whose scales have a scale."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from torch import Tensor, nn

from deltachain.chain.chain import Chain
from deltachain.errors import ConfigError
from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.push import push
from deltachain.store import open_store
from tests.unit.publish.library import PRESETS, llama, scheme
from tests.unit.publish.test_quantise import pulled

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
    tmp_path: Path, url: str, recipe: str, model: nn.Linear, change: float
) -> tuple[int, dict[str, list[list[int]]]]:
    """Changed elements of a version, and where each of its tensors changed, as weight[3, 41] does.

    Scales are told from their bits.
    """
    with Publisher(PublishConfig(url=url, quantization=recipe, dtype="BF16")).attach(model) as one:
        with torch.no_grad():
            model.weight[3, 41] = change
        receipt = one.publish(step=1).result()
    assert receipt.kind == "delta"
    before, after = pulled(url, tmp_path, 0), pulled(url, tmp_path, 1)

    def bits(tensor: Tensor) -> Tensor:
        return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor.view(torch.int32)

    where = {name: (bits(before[name]) != bits(after[name])).nonzero().tolist() for name in before}
    return receipt.nnz, {name: at for name, at in where.items() if at}


@pytest.mark.parametrize("recipe", sorted(WIDTHS))
def test_a_weight_that_changes_changes_its_byte_alone(recipe: str, tmp_path: Path) -> None:
    model, url = linear(), str(tmp_path / "chain")
    with torch.no_grad():
        model.weight[3, 40:48] = 0.1  # as large as any of its block
    nnz, where = differences(tmp_path, url, recipe, model, -0.1)
    assert where == {"weight_packed": [[3, 20]]}
    assert nnz == 1
    before, after = pulled(url, tmp_path / "2", 0), pulled(url, tmp_path / "2", 1)
    byte = int(before["weight_packed"][3, 20]), int(after["weight_packed"][3, 20])
    assert byte[0] ^ byte[1] == 0x80, "the sign of the second column"


@pytest.mark.parametrize("recipe", sorted(WIDTHS))
def test_a_scale_that_moves_changes_its_packed_block_alone(recipe: str, tmp_path: Path) -> None:
    width = WIDTHS[recipe]
    nnz, where = differences(tmp_path, str(tmp_path / "chain"), recipe, linear(), 1.5)
    assert where.keys() == {"weight_packed", "weight_scale"}
    assert where["weight_scale"] == [[3, 41 // width]]
    first = 41 // width * width // 2
    assert {row for row, _ in where["weight_packed"]} == {3}
    assert {column for _, column in where["weight_packed"]} <= set(range(first, first + width // 2))
    assert nnz == len(where["weight_packed"]) + 1


def test_a_largest_weight_that_moves_changes_the_global_scale(tmp_path: Path) -> None:
    _, where = differences(tmp_path, str(tmp_path / "chain"), "nvfp4a16", linear(), 5.0)
    assert where["weight_global_scale"] == [[0]]
    assert len(where["weight_scale"]) > 100  # those of other blocks follow it


def test_matrices_that_engines_load_into_one_have_one_global_scale(tmp_path: Path) -> None:
    model, url = llama(), str(tmp_path / "chain")
    config = PublishConfig(url=url, quantization="nvfp4a16")
    with Publisher(config).attach(model) as publisher:
        with torch.no_grad():
            model.model.layers[1].self_attn.k_proj.weight[0, 0] = 2.0
        publisher.publish(step=1).result()
    first, second = pulled(url, tmp_path, 0), pulled(url, tmp_path, 1)
    layer = "model.layers.1"
    for group in (("q", "k", "v"), ("gate", "up")):
        block = "self_attn" if "q" in group else "mlp"
        names = [f"{layer}.{block}.{name}_proj.weight_global_scale" for name in group]
        for version in (first, second):
            assert len({float(version[name]) for name in names}) == 1
            assert float(version[names[0]]) != float(
                version[f"{layer}.mlp.down_proj.weight_global_scale"]
            )
        moved = [bool(first[name] != second[name]) for name in names]
        assert moved == [block == "self_attn"] * len(group)
    assert float(second[f"{layer}.self_attn.v_proj.weight_global_scale"]) == 448 * 6 / 2.0


@pytest.mark.parametrize("recipe", sorted(PRESETS))
def test_the_configuration_is_that_of_the_library(recipe: str, tmp_path: Path) -> None:
    url, chosen = str(tmp_path / "chain"), scheme(recipe)
    Publisher(PublishConfig(url=url, quantization=recipe)).attach(llama()).close()
    pulled(url, tmp_path, 0)
    text = (tmp_path / "pulled-0" / "config.json").read_bytes()
    found = QuantizationConfig.model_validate(json.loads(text)["quantization_config"])
    expected = QuantizationConfig(
        config_groups={"group_0": chosen},
        format=chosen.format,
        quantization_status="compressed",
        ignore=["lm_head"],
    )
    assert found.model_dump() == expected.model_dump()


def test_tied_layers_have_tied_tensors(tmp_path: Path) -> None:
    model = nn.ModuleDict({name: nn.Linear(32, 30, bias=False) for name in ("a", "b")})
    model["b"].weight = model["a"].weight
    url = str(tmp_path / "chain")
    config = PublishConfig(url=url, quantization="nvfp4a16", dtype="BF16")
    Publisher(config).attach(model).close()
    table = Chain.open(open_store(url)).table
    names = ("weight_packed", "weight_scale", "weight_global_scale")
    assert table.aliases == {f"b.{name}": f"a.{name}" for name in names}
    assert [one.name for one in table.specs()] == sorted(f"a.{name}" for name in names)
    shapes = {one.name: (one.dtype, one.shape) for one in table.specs()}
    assert shapes == {
        "a.weight_packed": ("U8", (30, 16)),
        "a.weight_scale": ("F8_E4M3", (30, 2)),
        "a.weight_global_scale": ("F32", (1,)),
    }


# What is refused


@pytest.mark.parametrize("recipe", sorted(PRESETS))
def test_a_matrix_that_ends_within_a_block_is_refused(recipe: str, tmp_path: Path) -> None:
    model, url = llama(intermediate_size=200), str(tmp_path / "chain")
    config = PublishConfig(url=url, quantization=recipe)
    with pytest.raises(ConfigError, match=r"down_proj\.weight' has 200 columns") as caught:
        Publisher(config).attach(model)
    assert "leave its layer out" in caught.value.hint
    assert not list(tmp_path.rglob("chain.json"))
    model.save_pretrained(tmp_path / "saved")
    with pytest.raises(ConfigError, match=r"down_proj\.weight' has 200 columns"):
        push(open_store(url, writer=True), tmp_path / "saved", config)
    assert not list(tmp_path.rglob("chain.json"))


@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp8"])
def test_a_scale_that_no_exponent_of_8_bits_has_is_refused(recipe: str, tmp_path: Path) -> None:
    model, url = linear(), str(tmp_path / "chain")
    with Publisher(PublishConfig(url=url, quantization=recipe, dtype="BF16")).attach(model) as one:
        with torch.no_grad():
            model.weight[7, 9] = torch.finfo(torch.bfloat16).max
        with pytest.raises(ConfigError, match="'weight': a scale is not a positive finite number"):
            one.publish(step=1)
        assert one.version == 0
        with torch.no_grad():
            model.weight[7, 9] = 0.5
        assert one.publish(step=2).result().version == 1


def test_a_weight_beside_one_that_is_not_finite_is_not_blamed(tmp_path: Path) -> None:
    model, url = llama(), str(tmp_path / "chain")
    weight = model.model.layers[0].self_attn.q_proj.weight
    config = PublishConfig(url=url, quantization="nvfp4a16")
    with Publisher(config).attach(model) as publisher:
        with torch.no_grad():  # k_proj is quantised before it, and shares its global scale
            weight[1, 1] = float("inf")
        with pytest.raises(ConfigError, match=r"self_attn\.q_proj\.weight' has values that are no"):
            publisher.publish(step=1)
        assert publisher.version == 0
        with torch.no_grad():
            weight[1, 1] = 0.5
        assert publisher.publish(step=2).result().version == 1
