import copy
import importlib.metadata
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.quantizers.quantizers_utils import should_convert_module

from deltachain.chain.chain import Chain
from deltachain.errors import ChainMismatchError, ConfigError, DigestMismatchError, RankError
from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.model.source import collect_weights
from deltachain.publish.push import push
from deltachain.publish.quantise.layers import check_fused, layers_of_config
from deltachain.publish.quantise.settings import RECIPES, Quantization
from deltachain.publish.quantise.tensors import CutBlocks, exchange, quantise
from deltachain.publish.ranks.collectives import Ranks
from deltachain.publish.snapshot import Snapshot, SnapshotPlace
from deltachain.store import open_store
from deltachain.subscribe import FolderTarget, Subscriber
from tests.unit.publish.library import differing, llama, quantised_state
from tests.unit.publish.test_quantise import heavy

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


def masters_of(shape: tuple[int, int], seed: int) -> Tensor:
    """Weights between bf16 numbers, many of them halfway."""
    generator = torch.Generator().manual_seed(seed)
    values = heavy(shape, generator)
    halfway = torch.rand(shape, generator=generator) < 0.3
    bits = values.view(torch.int32)
    return torch.where(halfway, bits & ~0xFFFF | 0x8000, bits).view(torch.float32)


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.ModuleDict({"a": nn.Linear(300, 260), "b": nn.Linear(260, 130, bias=False)})


def weight_of(model: nn.Module, layer: str) -> Tensor:
    return dict(model.named_parameters())[f"{layer}.weight"]


def quantised_snapshot(
    model: nn.Module, recipe: str, *, on_device: bool, where: SnapshotPlace | None = None
) -> Snapshot:
    source = collect_weights(model, dtype="BF16")
    made = quantise(source, {"a.weight", "b.weight"}, RECIPES[recipe], Ranks.alone())
    made.agree("begin")
    return Snapshot(made, where=where, on_device=on_device)


def kept(snapshot: Snapshot) -> dict[str, bytes]:
    source = snapshot._source
    return {w.spec.name: snapshot.bits(w).tobytes() for w in source.weights}


@pytest.mark.full
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", [n for n in sorted(RECIPES) if RECIPES[n].arithmetic.rounding])
def test_the_device_path_finds_what_the_host_path_finds(
    recipe: str, dtype: torch.dtype, where: SnapshotPlace
) -> None:
    model = model_of(1).to(dtype)
    host = quantised_snapshot(model, recipe, on_device=False)
    device = quantised_snapshot(model, recipe, on_device=True, where=where)
    assert host.state == device.state
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for parameter in model.parameters():
                moved = torch.rand(parameter.shape, generator=generator) < 0.02
                parameter.mul_(torch.where(moved, 1.01 + step, 1.0).to(dtype))
        one, other = host.diff_(), device.diff_()
        assert one.live.keys() == other.live.keys() > {"a.weight", "b.weight"}
        for name, changes in one.live.items():
            for mine, theirs in zip(changes, other.live[name], strict=True):
                np.testing.assert_array_equal(mine, theirs)
        assert host.state == device.state
        assert kept(host) == kept(device)


@pytest.mark.parametrize("where", [None, "host", "device"])
def test_a_refused_weight_takes_the_whole_diff_back(where: SnapshotPlace | None) -> None:
    """On a device the refusal comes after all other tensors are compared."""
    model = model_of(1)
    snapshot = quantised_snapshot(model, "fp8-block", on_device=where is not None, where=where)
    before, state = kept(snapshot), snapshot.state
    right = weight_of(model, "b").detach().clone()
    with torch.no_grad():
        weight_of(model, "a").mul_(1.5)
        weight_of(model, "b")[129, 259] = torch.nan
    with pytest.raises(ConfigError, match=r"'b\.weight' has values that are not finite"):
        snapshot.diff_()
    assert (kept(snapshot), snapshot.state) == (before, state)
    with torch.no_grad():
        weight_of(model, "b").copy_(right)
    assert set(snapshot.diff_().live) == {"a.weight", "a.weight_scale_inv"}


def test_weights_that_become_zeros_are_named_once_on_a_device(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = model_of(1)
    snapshot = quantised_snapshot(model, "int8-row", on_device=True, where="device")
    with torch.no_grad():
        weight_of(model, "a")[3:5] = 1e-39
    for _ in range(2):
        assert snapshot.diff_().nnz >= 0
    named = [one for one in caplog.messages if "are published as 0" in one]
    assert len(named) == 1
    assert named[0].startswith("'a.weight': weights of at most 1.0e-39")


def test_an_export_that_is_quantised_may_use_its_memory_again() -> None:
    values = {name: masters_of((130, 140), seed) for seed, name in enumerate("abc")}

    def export() -> Iterator[tuple[str, Tensor]]:
        room = torch.empty(130, 140)
        for name, value in values.items():
            yield name, room.copy_(value)

    found = []
    for on_device in (False, True):
        source = collect_weights(export, dtype="BF16")
        made = quantise(source, set(values), RECIPES["fp8-block"], Ranks.alone())
        made.agree("begin")
        snapshot = Snapshot(made, on_device=on_device, where="device" if on_device else None)
        values["a"] *= 1.01
        values["c"] *= 1.02
        found.append({n: [c.tolist() for c in some] for n, some in snapshot.diff_().live.items()})
        values["a"] /= 1.01
        values["c"] /= 1.02
    assert {"a", "c"} < set(found[0])
    assert found[0]["c"] == found[1]["c"]
    assert "b" not in found[0] | found[1]


class Two(nn.Module):
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
