"""Recipe and layers of a checkpoint that is quantised already, from its ``config.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.quantizers.quantizers_utils import should_convert_module

from deltachain.errors import ConfigError
from deltachain.publish.quantise.settings import RECIPES, Quantization

LAYERS = (
    "lm_head",
    "model.lm_head",
    "model.layers.1.mlp.gate",
    "model.layers.11.mlp.gate",
    "model.layers.1.mlp.gate_proj",
    "model.visual.blocks.0.qkv",
)


def folder_of(config: dict[str, Any], tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    return tmp_path


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_a_recipe_writes_is_read_as_that_recipe(recipe: str, tmp_path: Path) -> None:
    written = RECIPES[recipe].arithmetic.config(["lm_head", "model.layers.1.mlp.gate"])
    found = Quantization.of(folder_of(written, tmp_path))
    assert found.recipe == recipe
    ignored = [layer for layer in LAYERS if found.ignores(layer)]
    assert {"lm_head", "model.layers.1.mlp.gate"} <= set(ignored)
    assert "model.layers.1.mlp.gate_proj" not in ignored
    assert Quantization.of(tmp_path / "config.json") == found


QWEN3 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
"""As in Qwen's and DeepSeek's fp8 checkpoints."""


@pytest.mark.parametrize(
    "entries",
    [["lm_head"], ["model.layers.1"], ["model.layers.*.mlp.gate", "visual"], ["gate"], []],
)
def test_entries_of_transformers_leave_the_layers_that_it_leaves(
    entries: list[str], tmp_path: Path
) -> None:
    found = Quantization.of(folder_of({**QWEN3, "modules_to_not_convert": entries}, tmp_path))
    assert found.recipe == "fp8-block"
    left = [layer for layer in LAYERS if not should_convert_module(layer, entries)]
    assert [layer for layer in LAYERS if found.ignores(layer)] == left


def test_deepseeks_powers_of_two_are_another_recipe(tmp_path: Path) -> None:
    found = Quantization.of(folder_of({**QWEN3, "scale_fmt": "ue8m0"}, tmp_path))
    assert found.recipe == "fp8-block-ue8m0"


LLM_COMPRESSOR: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": {
                "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token",
                "dynamic": True, "observer": None,
            },
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel",
                "dynamic": False, "observer": "minmax",
            },
        }
    },
    "format": "int-quantized",
    "ignore": ["lm_head", "re:.*mlp.gate$"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}  # fmt: skip


def test_checkpoints_of_llm_compressor(tmp_path: Path) -> None:
    found = Quantization.of(folder_of(LLM_COMPRESSOR, tmp_path))
    assert found.recipe == "int8-row"
    left = ["lm_head", "model.layers.1.mlp.gate", "model.layers.11.mlp.gate"]
    assert [layer for layer in LAYERS if found.ignores(layer)] == left


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_configuration_that_names_no_layers_leaves_the_output_layer(
    recipe: str, tmp_path: Path
) -> None:
    written = RECIPES[recipe].arithmetic.config(["lm_head"])
    if written["quant_method"] == "fp8":  # as DeepSeek-V3's
        del written["modules_to_not_convert"]
    assert Quantization.of(folder_of(written, tmp_path)).ignores("lm_head")


@pytest.mark.parametrize(
    "more",
    [
        {"sparsity_config": {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}},
        {"transform_config": {"config_groups": {"u": {"type": "hadamard", "apply": []}}}},
        {"format": "pack-quantized"},
        {"kv_cache_scheme": {"num_bits": 8, "type": "float"}},
    ],
)
def test_what_no_recipe_makes_beside_codes_is_refused(more: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'compressed-tensors'"):
        Quantization.of(folder_of(LLM_COMPRESSOR | more, tmp_path))


@pytest.mark.parametrize("entries", [5, [None], "lm_head"])
def test_layers_that_are_no_list_of_names_are_refused(entries: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'fp8'"):
        Quantization.of(folder_of(QWEN3 | {"modules_to_not_convert": entries}, tmp_path))


def test_other_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    with pytest.raises(ConfigError, match="quant_method 'gptq'"):
        Quantization.of(folder_of(gptq, tmp_path))
    with pytest.raises(ConfigError, match="quant_method 'fp8'"):
        Quantization.of(folder_of({**QWEN3, "weight_block_size": [64, 64]}, tmp_path))
    groups = {**LLM_COMPRESSOR["config_groups"]["group_0"], "targets": ["re:.*mlp.*"]}
    other = {**LLM_COMPRESSOR, "config_groups": {"group_0": groups}}
    with pytest.raises(ConfigError, match="'compressed-tensors'"):
        Quantization.of(folder_of(other, tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no quantization_config"):
        Quantization.of(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        Quantization.of(tmp_path / "away")
