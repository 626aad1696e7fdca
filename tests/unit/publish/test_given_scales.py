"""Scales and checkpoints that others quantised, and what a refused push leaves behind: nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from deltachain.errors import ChainMismatchError, ConfigError
from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.push import push
from deltachain.publish.quantise.settings import Quantization
from deltachain.store import open_store
from tests.unit.publish.library import llama


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
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    file, url = tmp_path / "model.safetensors", tmp_path / "chain"
    scales = torch.full((2, 2), 1).to(dtype)
    tensors = {"up.weight": torch.zeros(256, 256).to(torch.float8_e4m3fn), f"up.{name}": scales}
    sound = scales.clone()
    scales.view(torch.uint8)[-1, -dtype.itemsize :] = 0xFF  # NaN, in each of these dtypes
    save_file(tensors, file)
    store, config = open_store(str(url)), PublishConfig(url=str(url))
    with pytest.raises(ConfigError, match=f"'up.{name}' is a scale that is not finite"):
        push(store, file, config)
    assert not list(store.list())
    save_file(tensors | {f"up.{name}": sound}, file)
    push(store, file, config)
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=f"'up.{name}' is a scale that is not finite"):
        push(store, file, config)
    sound[0, 0] = 2
    save_file(tensors | {f"up.{name}": sound}, file)
    assert push(store, file, config).head.version == 1


def test_scale_that_is_not_finite_once_it_is_cast(tmp_path: Path) -> None:
    model, url = nn.Linear(8, 8), str(tmp_path / "chain")
    model.register_buffer("k_scale", torch.tensor(1e5))
    with pytest.raises(ConfigError, match="'k_scale' is a scale that is not finite"):
        Publisher(PublishConfig(url=url, dtype="F16")).attach(model)
    Publisher(PublishConfig(url=url, dtype="BF16")).attach(model).close()


def test_other_numbers_called_scales_are_published(tmp_path: Path) -> None:
    """Not every tensor with such a name is a scale of floating point, by its last word."""
    tensors = {
        "scale_net.weight": torch.full((4,), float("inf")),
        "up.scales": torch.full((4,), 255, dtype=torch.uint8),  # codes of scales
        "up.weight_scale": torch.full((4,), 1e300, dtype=torch.float64),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    store, config = open_store(str(tmp_path / "chain")), PublishConfig(url=str(tmp_path / "chain"))
    assert push(store, tmp_path / "model.safetensors", config).head.version == 0


def test_push_that_is_refused_leaves_no_chain(tmp_path: Path) -> None:
    """Else another choice of layers, as the hint says, would be refused as another model."""
    model = llama()
    weight = model.get_parameter("model.layers.1.mlp.down_proj.weight")
    with torch.no_grad():
        weight.fill_(1e-39)
    model.save_pretrained(tmp_path / "model")
    url = str(tmp_path / "chain")
    store = open_store(url)
    config = PublishConfig(url=url, quantization="fp8-block")
    with pytest.raises(ConfigError, match="scale is not a positive finite number") as caught:
        push(store, tmp_path / "model", config)
    assert "ignore" in caught.value.hint
    assert not list(store.list())
    without = Quantization("fp8-block", ignore=("lm_head", "model.layers.1.mlp.down_proj"))
    config = PublishConfig(url=url, quantization=without)
    assert push(store, tmp_path / "model", config).head.version == 0


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
