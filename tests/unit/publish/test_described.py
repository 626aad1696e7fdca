"""Whether config.json describes the weights beside it, as loading them needs."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    BigBirdPegasusConfig,
    BigBirdPegasusForCausalLM,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from deltachain.errors import ConfigError
from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.push import push
from deltachain.store import FileStore, MemoryStore
from tests.unit.publish.library import llama


def prune(model: LlamaForCausalLM) -> None:
    del model.model.layers[1]


def grow(model: LlamaForCausalLM) -> None:
    model.model.layers.append(llama(1).model.layers[0])


def head_bias(model: LlamaForCausalLM) -> None:
    model.lm_head.bias = nn.Parameter(torch.ones(96, dtype=torch.bfloat16))


def no_attention_bias(model: LlamaForCausalLM) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj.bias = None


def inner_norm(model: LlamaForCausalLM) -> None:
    model.model.layers[0].self_attn.q_norm = nn.LayerNorm(40).bfloat16()


EDITS: dict[str, tuple[Callable[[LlamaForCausalLM], None], str]] = {
    "pruned": (prune, r"'model\.layers\.1\.[a-z_.]*' is not among the weights"),
    "grown": (grow, r"'model\.layers\.2\.[a-z_.]*' is not in a model"),
    "head bias": (head_bias, r"'lm_head\.bias' is not in a model"),
    "attention bias": (no_attention_bias, r"'model\.layers\.0\.self_attn\.q_proj\.bias' is not am"),
    "inner norm": (inner_norm, r"'model\.layers\.0\.self_attn\.q_norm\.bias' is not in a model"),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("loaded", [True, False])
def test_a_model_of_other_weights_than_its_configuration_has_is_refused(
    tmp_path: Path, edit: str, *, loaded: bool
) -> None:
    model = llama()
    if loaded:
        model.save_pretrained(tmp_path / "origin")
        model = LlamaForCausalLM.from_pretrained(tmp_path / "origin", dtype=torch.bfloat16)
    change, why = EDITS[edit]
    change(model)
    with pytest.raises(ConfigError, match=why) as caught:
        Publisher(PublishConfig(url=str(tmp_path / "chain"))).attach(model, alone=True)
    assert "num_hidden_layers" in caught.value.hint
    assert "PublishConfig.assets" in caught.value.hint
    assert not (tmp_path / "chain").exists()


def test_a_model_whose_class_ties_nothing_is_published(tmp_path: Path) -> None:
    config = BigBirdPegasusConfig(
        vocab_size=20,
        d_model=8,
        encoder_ffn_dim=8,
        decoder_ffn_dim=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
    )
    assert config.tie_word_embeddings
    model = BigBirdPegasusForCausalLM(config)
    with Publisher(PublishConfig(url=str(tmp_path / "chain"))).attach(model) as publisher:
        assert publisher.version == 0


def test_a_model_without_a_layer_whose_configuration_says_so_is_published(tmp_path: Path) -> None:
    model = llama()
    prune(model)
    model.config.num_hidden_layers = 1
    with Publisher(PublishConfig(url=str(tmp_path / "chain"))) as publisher:
        assert publisher.attach(model, alone=True).version == 0


def test_a_head_of_its_own_beside_a_model_is_published_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = llama()
    model.v_head = nn.Linear(160, 1)
    with Publisher(PublishConfig(url=str(tmp_path / "chain"))) as publisher:
        publisher.attach(model, alone=True)
    assert "'v_head.weight'" in caplog.text
    assert "from_pretrained leaves" in caplog.text


def saved(folder: Path, edit: Callable[[dict[str, Tensor]], object], **fields: Any) -> Path:
    """A folder whose weights or configuration were edited."""
    llama().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    document = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(document | fields))
    return folder


def keep(_: dict[str, Tensor]) -> None:
    pass


def refused(folder: Path, why: str) -> None:
    store = MemoryStore()
    with pytest.raises(ConfigError, match=why) as caught:
        push(store, folder, PublishConfig(url=store.url))
    assert "config.json" in caught.value.hint
    assert not list(store.list(""))


FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "pruned": ({"num_hidden_layers": 3}, r"'model\.layers\.2\.[a-z_.]*' is not among the weights"),
    "grown": ({"num_hidden_layers": 1}, r"'model\.layers\.1\.[a-z_.]*' is not in a model"),
    "no bias": ({"attention_bias": False}, r"bias' is not in a model"),
    "vocabulary": ({"vocab_size": 90}, r"has shape \(96, 160\), and by config\.json \(90, 160\)"),
    "class": ({"architectures": ["LlamaForSequenceClassification"]}, r"'score\.weight'"),
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_folder_whose_configuration_does_not_describe_its_weights_is_refused(
    tmp_path: Path, field: str
) -> None:
    fields, why = FIELDS[field]
    refused(saved(tmp_path / "c", keep, **fields), why)


@pytest.mark.parametrize("recipe", [None, "fp8-row"])
def test_a_folder_is_refused_before_it_is_quantised(tmp_path: Path, recipe: str | None) -> None:
    folder, store = saved(tmp_path / "c", lambda t: t.pop("model.norm.weight")), MemoryStore()
    with pytest.raises(ConfigError, match=r"'model\.norm\.weight' is not among the weights"):
        push(store, folder, PublishConfig(url=store.url, quantization=recipe))
    assert not list(store.list(""))


def test_heads_for_later_tokens_in_a_folder_are_published_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors |= {
            name.replace("layers.1.", "layers.2."): tensor.clone()
            for name, tensor in tensors.items()
            if "layers.1." in name
        }
        tensors["mtp.norm.weight"] = torch.ones(160)

    folder = saved(tmp_path / "c", add, num_nextn_predict_layers=1)
    push(FileStore(tmp_path / "chain"), folder, PublishConfig(url="x"))
    assert "from_pretrained leaves" in caplog.text
    assert "'mtp.norm.weight'" in caplog.text


def moe() -> nn.Module:
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            hidden_size=32,
            intermediate_size=32,
            moe_intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=64,
            num_experts=4,
            num_experts_per_tok=2,
        )
    )


def tied() -> nn.Module:
    return llama(tie_word_embeddings=True)


@pytest.mark.parametrize("make", [llama, tied, moe])
def test_what_transformers_saved_is_pushed_without_a_word(
    tmp_path: Path,
    make: Callable[[], Any],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    make().save_pretrained(tmp_path / "c")
    capfd.readouterr()
    with caplog.at_level(logging.INFO):
        push(FileStore(tmp_path / "chain"), tmp_path / "c", PublishConfig(url="x"))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "LOAD REPORT" not in "".join(capfd.readouterr())
    assert "Loading weights" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "of_another_library"},
        {"architectures": ["OfAnotherLibrary"]},
        {"architectures": None},
        {"num_hidden_layers": 7, "quantization_config": {"quant_method": "unheard"}},
    ],
)
def test_a_configuration_that_transformers_makes_no_model_of_is_published_as_it_is(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    folder = saved(tmp_path / "c", keep, **fields)
    pushed = push(FileStore(tmp_path / "chain"), folder, PublishConfig(url="x"))
    assert pushed.head.version == 0


def test_an_export_that_its_files_do_not_describe_is_refused(tmp_path: Path) -> None:
    model = llama()
    folder = saved(tmp_path / "c", keep)
    wrong = {f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    config = PublishConfig(url=str(tmp_path / "wrong"), assets=folder)
    with Publisher(config) as publisher, pytest.raises(ConfigError, match=r"config\.json"):
        publisher.attach(wrong.items, alone=True)
    config = PublishConfig(url=str(tmp_path / "right"), assets=folder)
    with Publisher(config) as publisher:
        publisher.attach(lambda: model.state_dict().items(), alone=True)
