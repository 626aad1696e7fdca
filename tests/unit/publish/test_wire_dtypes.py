"""The wire dtypes of live weights, and casts to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from deltachain.errors import ConfigError
from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.model.assets import collect_assets
from deltachain.publish.model.source import collect_weights
from deltachain.publish.model.wire_dtypes import wire_dtype
from deltachain.store import MemoryStore
from tests.support.models import TinyModel, bits_of, plain_model, recompute, same, train_
from tests.unit.publish.test_source import dtypes, folder_of


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="no wire form"):
        collect_weights(plain_model(), dtype="bfloat16")


def test_fp16_is_not_published_as_bf16_nor_the_reverse_unless_asked(tmp_path: Path) -> None:
    saved = {name: tensor.half() for name, tensor in plain_model().state_dict().items()}
    folder = folder_of(saved, tmp_path / "fp16")
    with pytest.raises(ConfigError, match="BF16 in the model and F16 in its checkpoint") as caught:
        collect_weights(plain_model(), checkpoint=folder)
    assert "dtype='BF16' publishes what is trained" in caught.value.hint
    halves = folder_of(plain_model().state_dict(), tmp_path / "bf16")
    with pytest.raises(ConfigError, match="F16 in the model and BF16 in its checkpoint"):
        collect_weights(plain_model(dtype=torch.float16), checkpoint=halves)
    asked = collect_weights(plain_model(), checkpoint=folder, dtype="F16")
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
    model = plain_model()
    model[1].float()  # type: ignore[index]
    collect_weights(model, dtype="BF16")
    assert "rounds 2 weights" in caplog.text
    assert "'1.bias'" in caplog.text
    caplog.clear()
    folder = folder_of(model.state_dict(), tmp_path / "mixed")
    collect_weights(model.float(), dtype="BF16", checkpoint=folder)
    assert "rounds 2 weights" in caplog.text
    caplog.clear()
    collect_weights(model, dtype="BF16")
    assert not caplog.text


def test_a_wire_dtype_wider_than_the_model_is_refused(tmp_path: Path) -> None:
    folder = folder_of({"0.weight": torch.zeros(40, 24)}, tmp_path / "fp32")
    with pytest.raises(ConfigError, match="BF16 in the model and F32") as caught:
        collect_weights(plain_model(), checkpoint=folder)
    assert "dtype=" in caught.value.hint


def test_each_weight_has_its_own_dtype_by_default() -> None:
    found = dtypes(TinyModel())
    assert (found["layer.weight"], found["norm.weight"]) == ("BF16", "F32")


def test_dtypes_of_single_tensors_differ_as_in_the_checkpoint(tmp_path: Path) -> None:
    tensors = plain_model().state_dict()
    tensors["1.bias"] = tensors["1.bias"].float()
    source = collect_weights(
        plain_model(dtype=torch.float32), checkpoint=folder_of(tensors, tmp_path / "mix")
    )
    assert {w.spec.name for w in source.weights if w.spec.dtype == "F32"} == {"1.bias"}


def test_a_folder_of_other_files_says_nothing_about_dtypes(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    assert set(dtypes(plain_model(), checkpoint=tmp_path).values()) == {"BF16"}  # type: ignore[arg-type]


def test_a_checkpoint_that_cannot_be_read_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_of(plain_model(dtype=torch.float16).state_dict(), tmp_path / "fp16")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    collect_weights(plain_model(), checkpoint=folder)
    assert (
        "the dtypes of the checkpoint that the model was loaded from are not known" in caplog.text
    )


@pytest.mark.parametrize("asked", ["F16", None])
def test_a_wire_dtype_of_a_narrower_range_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, asked: str | None
) -> None:
    folder = folder_of(plain_model(dtype=torch.float16).state_dict(), tmp_path / "fp16")
    collect_weights(plain_model(dtype=torch.float32), dtype=asked, checkpoint=folder)
    assert "published as F16, in which values below 3e-08 become zero" in caplog.text


def test_weights_of_an_export_that_a_given_dtype_rounds_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tensors = {"up": torch.zeros(2, dtype=torch.bfloat16), "router.bias": torch.zeros(2)}
    collect_weights(tensors.items)
    assert not caplog.text
    collect_weights(tensors.items, dtype="BF16")
    assert "rounds 1 weights" in caplog.text
    assert "'router.bias'" in caplog.text


def test_a_dtype_given_outright_wins_for_floats_and_leaves_integers(tmp_path: Path) -> None:
    model = TinyModel()
    model.config = SimpleNamespace(_name_or_path=str(tmp_path))  # type: ignore[assignment]
    assert set(dtypes(model, dtype="BF16").values()) == {"BF16", "I64"}


def test_fp32_masters_are_rounded_to_nearest_even(
    attach: Callable[..., Publisher], store: MemoryStore
) -> None:
    model = plain_model(dtype=torch.float32)
    publisher = attach(model, dtype="BF16")
    train_(model, 1, share=0.1)
    publisher.publish()
    publisher.flush()
    bf16 = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    assert same(recompute(store)[1].state, bits_of(bf16))


def test_updates_below_half_a_bf16_step_are_not_published(
    attach: Callable[..., Publisher],
) -> None:
    model = plain_model(dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16).float())
    publisher = attach(model, dtype="BF16")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1).view(torch.int32).add_(1)
    publisher.publish()
    receipt = publisher.flush()
    assert receipt is not None
    assert receipt.nnz == 0


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


@pytest.mark.parametrize("name", ["_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"])
def test_what_a_class_keeps_in_fp32_is_published_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    model = of_bf16(plain_model(), tmp_path / "bf16")
    model[1].float()  # type: ignore[index]
    setattr(model, name, {"1.we*ht"})
    found = dtypes(model)
    assert {one for one, dtype in found.items() if dtype == "F32"} == {"1.weight"}
    assert "1 weights such as '1.bias' are rounded to BF16" in caplog.text
    caplog.clear()
    assert set(dtypes(model.float()).values()) == {"BF16"}  # masters
    assert not caplog.text


def test_fp32_weights_of_a_bf16_model_that_are_rounded_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = of_bf16(plain_model(), tmp_path / "bf16")
    model[1].float()  # type: ignore[index]
    assert set(dtypes(model).values()) == {"BF16"}
    assert "2 weights such as '1.bias' are rounded to BF16" in caplog.text
    assert "dtype='model'" in caplog.text
    caplog.clear()
    own = dtypes(model, dtype="model")
    assert {one for one, dtype in own.items() if dtype == "F32"} == {"1.bias", "1.weight"}
    assert not caplog.text


def test_a_wrapped_model_keeps_its_dtypes_and_its_configuration(tmp_path: Path) -> None:
    checkpoint = tmp_path / "base"
    config = Qwen3Config(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        head_dim=4,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(checkpoint)
    model = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    wrapped = nn.DataParallel(model)
    assert {spec.dtype for spec in collect_weights(wrapped).specs} == {"BF16"}
    assert collect_weights(wrapped).specs == collect_weights(model).specs
    assert "config.json" in collect_assets(wrapped, PublishConfig(url="memory://x"))
