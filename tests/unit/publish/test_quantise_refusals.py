"""What a publisher that quantises refuses, by name and before anything is published."""

from __future__ import annotations

import copy
import importlib.metadata
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from transformers import GptOssConfig, GptOssForCausalLM

from deltachain.chain.chain import Chain
from deltachain.errors import ChainMismatchError, ConfigError, DigestMismatchError, RankError
from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.push import push
from deltachain.publish.quantise.layers import check_fused, layers_of_config
from deltachain.publish.quantise.settings import Quantization
from deltachain.publish.quantise.tensors import CutBlocks, exchange
from deltachain.publish.ranks.collectives import Ranks
from deltachain.store import open_store
from deltachain.subscribe import FolderTarget, Subscriber
from tests.unit.publish.library import differing, llama, quantised_state


class Two(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(64, 160, dtype=torch.bfloat16)
        self.down = nn.Linear(160, 64, dtype=torch.bfloat16)


def attached(url: str, model: nn.Module | None = None, **settings: Any) -> Publisher:
    config = PublishConfig(url=url, **{"quantization": "fp8-block", **settings})
    return Publisher(config).attach(model or Two())


def test_recipe_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="'fp3-block': no such recipe") as caught:
        PublishConfig(url="memory://x", quantization="fp3-block")
    assert "int8-row, mxfp4, mxfp8, nvfp4a16" in caught.value.hint


def test_pattern_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"ignore has 're:\('"):
        Quantization("int8-row", ignore=("re:(",))


def test_base_has_no_codes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="base and quantization exclude each other"):
        PublishConfig(url="memory://x", quantization="int8-row", base=tmp_path)


def test_library_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ConfigError, match="needs compressed-tensors, which is not") as caught:
        attached(str(tmp_path / "chain"), quantization="int8-row")
    assert caught.value.hint == "pip install 'deltachain[quantization]'"
    assert not (tmp_path / "chain" / "chain.json").exists()


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ("fp8-block", "fp8-row"),
        ("fp8-row", "fp8-tensor"),
        ("fp8-block", "fp8-block-ue8m0"),
        ("int8-row", None),
        (None, "int8-row"),
        ("fp8-block", "mxfp8"),
        ("mxfp4", "nvfp4a16"),
        ("nvfp4a16", None),
    ],
)
def test_chain_keeps_its_recipe(then: str | None, now: str | None, tmp_path: Path) -> None:
    url = str(tmp_path / "chain")
    attached(url, quantization=then).close()
    with pytest.raises(ChainMismatchError) as caught:
        attached(url, quantization=now)
    for recipe in (then, now):
        named = f"recipe {recipe} of" if recipe else "weights that are not quantised"
        assert named in str(caught.value)
    assert "use another URL" in caught.value.hint
    assert Chain.open(open_store(url)).newest(0) == 0


@pytest.mark.parametrize("recipe", ["int8-row", "mxfp4"])
def test_chain_keeps_its_layers(recipe: str, tmp_path: Path) -> None:
    url = str(tmp_path / "chain")
    attached(url, quantization=recipe).close()
    fewer = Quantization(recipe, ignore=("up",))
    with pytest.raises(ChainMismatchError, match="weight") as caught:
        attached(url, quantization=fewer)
    assert "the same layers" in caught.value.hint
    assert "(ignore)" in caught.value.hint
    assert Chain.open(open_store(url)).newest(0) == 0


def test_chain_keeps_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(tmp_path / "chain")
    attached(url, quantization="int8-row").close()
    installed = importlib.metadata.version("compressed-tensors")
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda n: "9.9" if n == "compressed-tensors" else real(n)
    )
    with pytest.raises(ChainMismatchError, match=r"compressed-tensors 9\.9") as caught:
        attached(url, quantization="int8-row")
    assert f"compressed-tensors=={installed}" in caught.value.hint
    assert Chain.open(open_store(url)).newest(0) == 0


def test_push_without_the_recipe_of_the_chain(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "saved")
    url = str(tmp_path / "chain")
    config = PublishConfig(url=url, quantization="int8-row")
    push(open_store(url, writer=True), tmp_path / "saved", config)
    with pytest.raises(ChainMismatchError, match="quantised by recipe int8-row"):
        push(open_store(url, writer=True), tmp_path / "saved", PublishConfig(url=url))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "recipe", ["fp8-block", "fp8-tensor", "int8-row", "mxfp4", "mxfp8", "nvfp4a16"]
)
def test_weights_that_are_not_finite(recipe: str, value: float, tmp_path: Path) -> None:
    model, url = Two(), str(tmp_path / "chain")
    publisher = attached(url, model, quantization=recipe)
    kept = float(model.down.weight.detach()[3, 5])
    with torch.no_grad():
        model.up.weight[0, 0] += 0.25
        model.down.weight[3, 5] = value
    with pytest.raises(ConfigError, match=r"'down\.weight' has values that are not finite"):
        publisher.publish(step=1)
    assert publisher.version == 0
    with torch.no_grad():
        model.down.weight[3, 5] = kept
    receipt = publisher.publish(step=2).result()
    assert (receipt.version, receipt.nnz > 0) == (1, True)
    publisher.close()


def test_scale_that_is_no_positive_number(tmp_path: Path) -> None:
    model = Two()
    with torch.no_grad():
        model.up.weight[:128] = 1e-39  # 448 / 1e-39 is no fp32 number
    with pytest.raises(ConfigError, match=r"'up\.weight': a scale is not a positive finite number"):
        attached(str(tmp_path / "chain"), model)
    assert not (tmp_path / "chain" / "chain.json").exists()


@pytest.mark.parametrize(
    ("ignore", "group"),
    [
        (("k_proj",), "model.layers.0.self_attn.q_proj+k_proj+v_proj"),
        (("q_proj", "v_proj"), "model.layers.0.self_attn.q_proj+k_proj+v_proj"),
        (("re:.*layers.1.mlp.up_proj",), "model.layers.1.mlp.gate_proj+up_proj"),
    ],
)
def test_part_of_a_layer_that_engines_compute_as_one(
    ignore: tuple[str, ...], group: str, tmp_path: Path
) -> None:
    chosen = Quantization("int8-row", ignore=("lm_head", *ignore))
    with pytest.raises(ConfigError, match=f"compute both as one layer, {re.escape(group)}"):
        attached(str(tmp_path / "chain"), llama(), quantization=chosen)
    assert not (tmp_path / "chain" / "chain.json").exists()


def test_experts_of_a_layer_are_quantised_together() -> None:
    experts = [f"mlp.experts.{n}.{name}_proj" for n in range(3) for name in ("gate", "up", "down")]
    check_fused(experts, ["mlp.gate", "mlp.shared_experts.up_proj", "1.mlp.experts.0.up_proj"])
    with pytest.raises(ConfigError, match=r"'mlp\.experts\.1\.down_proj' is ignored") as caught:
        check_fused([one for one in experts if "1.down" not in one], ["mlp.experts.1.down_proj"])
    assert caught.value.hint == "ignore all layers of it, or none"


@pytest.mark.parametrize("recipe", ["fp8-row", "int8-row"])
def test_weights_that_the_library_turns_into_zeros_are_named(
    recipe: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, url = Two(), str(tmp_path / "chain")
    with torch.no_grad():
        model.up.weight[3:5] = -1e-39  # a scale of that size is 0 in bf16
        model.down.weight[7] = 0
    whole = nn.ModuleDict({"up": copy.deepcopy(model.up), "down": copy.deepcopy(model.down)})
    with attached(url, model, quantization=recipe) as publisher:
        with torch.no_grad():
            model.up.bias.add_(1)
        publisher.publish().result()
    named = [one for one in caplog.messages if "are published as 0" in one]
    assert len(named) == 1  # not again with the next version
    assert named[0].startswith("'up.weight': weights of at most 1.0e-39 are published as 0 in 2 of")
    Subscriber(url, FolderTarget(tmp_path / "out")).update(0)
    found = load_file(next((tmp_path / "out").glob("*.safetensors")))
    assert not found["up.weight"][3:5].float().any()
    assert differing(found, quantised_state(whole, recipe, ())) == set()


def test_models_that_are_quantised_already(tmp_path: Path) -> None:
    model = llama()
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ConfigError, match="LlamaForCausalLM is quantised already"):
        attached(str(tmp_path / "chain"), model)
    plain = Two()
    plain.up.weight = nn.Parameter(plain.up.weight.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ConfigError, match=r"'up\.weight' is F8_E4M3: quantised already"):
        attached(str(tmp_path / "chain"), plain)


def test_checkpoints_that_are_quantised_already(tmp_path: Path) -> None:
    model, saved, url = llama(), tmp_path / "saved", str(tmp_path / "chain")
    model.save_pretrained(saved)
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "fp8"}})
    )
    with pytest.raises(ConfigError, match="the checkpoint is quantised already"):
        push(open_store(url, writer=True), saved, PublishConfig(url=url, quantization="int8-row"))
    with pytest.raises(ConfigError, match=r"config\.json is of a quantised checkpoint"):
        attached(url, model, assets=saved)


def test_experts_that_a_checkpoint_has_as_one_tensor(tmp_path: Path) -> None:
    model = GptOssForCausalLM(
        GptOssConfig(
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=1,
            num_local_experts=2,
            num_experts_per_tok=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            vocab_size=40,
            layer_types=["full_attention"],
        )
    ).bfloat16()
    url = str(tmp_path / "chain")
    with pytest.raises(ConfigError, match=r"'model\.layers\.0\.mlp\.experts\.down_proj'") as caught:
        attached(url, model)
    assert "ignore 'model.layers.0.mlp.experts'" in caught.value.hint
    left = Quantization("fp8-block", ignore=("lm_head", "experts"))
    with attached(url, model, quantization=left) as publisher:
        assert publisher.version == 0


def test_model_without_a_linear_layer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no linear layer is left"):
        attached(str(tmp_path / "chain"), nn.Embedding(4, 4))


def test_export_without_a_configuration(tmp_path: Path) -> None:
    model = Two()
    with pytest.raises(ConfigError, match=r"no config\.json shows which layers") as caught:
        attached(str(tmp_path / "chain"), lambda: model.state_dict().items())  # type: ignore[arg-type]
    assert "assets=" in caught.value.hint


def test_code_or_scale_altered_in_the_store_is_refused(tmp_path: Path) -> None:
    model, url = Two(), str(tmp_path / "chain")
    with attached(url, model) as publisher:
        table = Chain.open(open_store(url)).table.specs()
        weights = {one.name: torch.zeros(one.shape, dtype=_dtype(one.dtype)) for one in table}
        Subscriber(url, weights).update()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.25)  # codes and scales
        publisher.publish(step=1).result()
    held = {name: tensor.clone() for name, tensor in weights.items()}
    (part,) = (tmp_path / "chain" / "deltas").rglob("*.safetensors")
    whole = part.read_bytes()
    for at in range(len(whole) // 3, len(whole), 97):
        part.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        with pytest.raises(DigestMismatchError):
            Subscriber(url, weights).update()
        for name, tensor in weights.items():
            assert torch.equal(tensor.view(torch.uint8), held[name].view(torch.uint8)), name
    part.write_bytes(whole)
    Subscriber(url, weights).update()
    assert not torch.equal(weights["up.weight_scale_inv"], held["up.weight_scale_inv"])


def _dtype(name: str) -> torch.dtype:
    return {"F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32, "BF16": torch.bfloat16}[name]


def test_an_error_in_blocks_of_one_rank_reaches_the_others() -> None:
    store = HashStore()
    both = [Ranks(number, 2, 60.0, store) for number in range(2)]

    def failing() -> Iterator[CutBlocks]:
        yield from ()
        raise MemoryError("no room for the blocks")

    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(exchange, both[1], "version", ())
        with pytest.raises(MemoryError):
            exchange(both[0], "version", failing())
        with pytest.raises(RankError, match="no room for the blocks"):
            waiting.result(20)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scale_of_the_model_that_is_not_finite(value: float, tmp_path: Path) -> None:
    model, url = Two(), str(tmp_path / "chain")
    model.register_buffer("k_scale", torch.tensor(0.5))
    publisher = attached(url, model)
    with torch.no_grad():
        model.up.weight[0, 0] += 0.25
    model.get_buffer("k_scale").fill_(value)
    with pytest.raises(ConfigError, match="'k_scale' is a scale that is not finite"):
        publisher.publish(step=1)
    assert publisher.version == 0
    model.get_buffer("k_scale").fill_(0.75)
    assert publisher.publish(step=2).result().version == 1
    publisher.close()
    model.get_buffer("k_scale").fill_(value)
    with pytest.raises(ConfigError, match="'k_scale' is a scale that is not finite"):
        attached(str(tmp_path / "other"), model)


def test_a_config_without_the_type_of_its_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no model_type"):
        layers_of_config({"architectures": ["LlamaForCausalLM"]})
