import copy
import importlib.metadata
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.quantizers.quantizers_utils import should_convert_module

from deltachain.errors import ChainMismatchError, ConfigError, DigestMismatchError, RankError
from deltachain.publish.model.layout import Box
from deltachain.publish.model.source import collect_weights
from deltachain.publish.quantise import settings as registry
from deltachain.publish.quantise.compressed import INT8_ROW
from deltachain.publish.quantise.layers import check_fused, layers_of_config
from deltachain.publish.quantise.settings import GROUP, RECIPES, Quantization, RecipeRegistry
from deltachain.publish.quantise.tensors import CutBlocks, exchange, quantise
from deltachain.publish.ranks.collectives import Ranks
from deltachain.publish.snapshot import Snapshot, SnapshotPlace
from deltachain.subscribe import Subscriber
from deltachain.torch_names import TORCH_DTYPES
from tests.support.made_up import write_package
from tests.unit.cli.support import invoke, ok
from tests.unit.publish.acme_ternary import TERNARY, dense
from tests.unit.publish.chains import Quantised
from tests.unit.publish.library import differing, llama, quantised_state
from tests.unit.publish.test_quantise import heavy, in_windows, windows

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
    written = RECIPES.chosen(recipe).arithmetic.config(["lm_head", "model.layers.1.mlp.gate"])
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


def test_checkpoints_of_others_are_read(tmp_path: Path) -> None:
    found = Quantization.of(folder_of(LLM_COMPRESSOR, tmp_path))
    assert found.recipe == "int8-row"
    left = ["lm_head", "model.layers.1.mlp.gate", "model.layers.11.mlp.gate"]
    assert [layer for layer in LAYERS if found.ignores(layer)] == left
    deepseek = folder_of({**QWEN3, "scale_fmt": "ue8m0"}, tmp_path)
    assert Quantization.of(deepseek).recipe == "fp8-block-ue8m0"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_configuration_that_names_no_layers_leaves_the_output_layer(
    recipe: str, tmp_path: Path
) -> None:
    written = RECIPES.chosen(recipe).arithmetic.config(["lm_head"])
    if written["quant_method"] == "fp8":  # as DeepSeek-V3's
        del written["modules_to_not_convert"]
    assert Quantization.of(folder_of(written, tmp_path)).ignores("lm_head")


GROUP_0 = LLM_COMPRESSOR["config_groups"]["group_0"]
SPARSE = {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}
TRANSFORM = {"config_groups": {"u": {"type": "hadamard", "apply": []}}}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (LLM_COMPRESSOR | {"sparsity_config": SPARSE}, "'compressed-tensors'"),
        (LLM_COMPRESSOR | {"transform_config": TRANSFORM}, "'compressed-tensors'"),
        (LLM_COMPRESSOR | {"format": "pack-quantized"}, "'compressed-tensors'"),
        (LLM_COMPRESSOR | {"kv_cache_scheme": {"num_bits": 8}}, "'compressed-tensors'"),
        (
            LLM_COMPRESSOR | {"config_groups": {"group_0": GROUP_0 | {"targets": ["re:.*mlp.*"]}}},
            "'compressed-tensors'",
        ),
        (QWEN3 | {"modules_to_not_convert": 5}, "'fp8'"),
        (QWEN3 | {"modules_to_not_convert": [None]}, "'fp8'"),
        (QWEN3 | {"modules_to_not_convert": "lm_head"}, "'fp8'"),
        (QWEN3 | {"weight_block_size": [64, 64]}, "quant_method 'fp8'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "quant_method 'gptq'"),
        (None, "no quantization_config"),
        ("no file", "cannot be read"),
    ],
)
def test_what_no_recipe_makes_is_refused_by_name(config: Any, why: str, tmp_path: Path) -> None:
    folder = folder_of(config, tmp_path)
    if config is None:
        (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=why):
        Quantization.of(folder / "away" if config == "no file" else folder)


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
    made = quantise(source, {"a.weight", "b.weight"}, RECIPES.chosen(recipe), Ranks.alone())
    made.agree("begin")
    return Snapshot(made, where=where, on_device=on_device)


def kept(snapshot: Snapshot) -> dict[str, bytes]:
    source = snapshot._source
    return {w.spec.name: snapshot.bits(w).tobytes() for w in source.weights}


ROUNDING = [name for name in sorted(RECIPES) if RECIPES.chosen(name).arithmetic.rounding]


@pytest.mark.full
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ROUNDING)
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
        made = quantise(source, set(values), RECIPES.chosen("fp8-block"), Ranks.alone())
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


def test_pattern_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"ignore has 're:\('"):
        Quantization("int8-row", ignore=("re:(",))


def test_library_that_is_not_installed(chain: Quantised, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ConfigError, match="needs compressed-tensors, which is not") as caught:
        chain.attach(Two(), "int8-row")
    assert caught.value.hint == "pip install 'deltachain[quantization]'"
    assert not chain.begun


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
def test_chain_keeps_its_recipe(then: str | None, now: str | None, chain: Quantised) -> None:
    chain.attach(Two(), then).close()
    with pytest.raises(ChainMismatchError) as caught:
        chain.attach(Two(), now)
    for recipe in (then, now):
        named = f"recipe {recipe} of" if recipe else "weights that are not quantised"
        assert named in str(caught.value)
    assert "use another URL" in caught.value.hint
    assert chain.newest == 0


@pytest.mark.parametrize("recipe", ["int8-row", "mxfp4"])
def test_chain_keeps_its_layers(recipe: str, chain: Quantised) -> None:
    chain.attach(Two(), recipe).close()
    with pytest.raises(ChainMismatchError, match="weight") as caught:
        chain.attach(Two(), Quantization(recipe, ignore=("up",)))
    assert "the same layers" in caught.value.hint
    assert "(ignore)" in caught.value.hint
    assert chain.newest == 0


def test_chain_keeps_its_library(chain: Quantised, monkeypatch: pytest.MonkeyPatch) -> None:
    chain.attach(Two(), "int8-row").close()
    real = importlib.metadata.version
    installed = real("compressed-tensors")
    monkeypatch.setattr(
        importlib.metadata, "version", lambda n: "9.9" if n == "compressed-tensors" else real(n)
    )
    with pytest.raises(ChainMismatchError, match=r"compressed-tensors 9\.9") as caught:
        chain.attach(Two(), "int8-row")
    assert f"compressed-tensors=={installed}" in caught.value.hint
    assert chain.newest == 0


def test_push_without_the_recipe_of_the_chain(chain: Quantised, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "saved")
    chain.push(tmp_path / "saved", "int8-row")
    with pytest.raises(ChainMismatchError, match="quantised by recipe int8-row"):
        chain.push(tmp_path / "saved", None)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "recipe", ["fp8-block", "fp8-tensor", "int8-row", "mxfp4", "mxfp8", "nvfp4a16"]
)
def test_weights_that_are_not_finite(recipe: str, value: float, chain: Quantised) -> None:
    model = Two()
    kept = float(model.down.weight.detach()[3, 5])
    with chain.attach(model, recipe) as publisher, torch.no_grad():
        model.up.weight[0, 0] += 0.25
        model.down.weight[3, 5] = value
        with pytest.raises(ConfigError, match=r"'down\.weight' has values that are not finite"):
            publisher.publish(step=1)
        assert publisher.version == 0
        model.down.weight[3, 5] = kept
        receipt = publisher.publish(step=2).result()
        assert (receipt.version, receipt.nnz > 0) == (1, True)


@pytest.mark.parametrize(
    ("ignore", "group"),
    [
        (("k_proj",), "model.layers.0.self_attn.q_proj+k_proj+v_proj"),
        (("q_proj", "v_proj"), "model.layers.0.self_attn.q_proj+k_proj+v_proj"),
        (("re:.*layers.1.mlp.up_proj",), "model.layers.1.mlp.gate_proj+up_proj"),
    ],
)
def test_part_of_a_layer_that_engines_compute_as_one(
    ignore: tuple[str, ...], group: str, chain: Quantised
) -> None:
    chosen = Quantization("int8-row", ignore=("lm_head", *ignore))
    with pytest.raises(ConfigError, match=f"compute both as one layer, {re.escape(group)}"):
        chain.attach(llama(), chosen)
    assert not chain.begun


def test_experts_of_a_layer_are_quantised_together() -> None:
    experts = [f"mlp.experts.{n}.{name}_proj" for n in range(3) for name in ("gate", "up", "down")]
    check_fused(experts, ["mlp.gate", "mlp.shared_experts.up_proj", "1.mlp.experts.0.up_proj"])
    with pytest.raises(ConfigError, match=r"'mlp\.experts\.1\.down_proj' is ignored") as caught:
        check_fused([one for one in experts if "1.down" not in one], ["mlp.experts.1.down_proj"])
    assert caught.value.hint == "ignore all layers of it, or none"


@pytest.mark.parametrize("recipe", ["fp8-row", "int8-row"])
def test_weights_that_the_library_turns_into_zeros_are_named(
    recipe: str, chain: Quantised, caplog: pytest.LogCaptureFixture
) -> None:
    model = Two()
    with torch.no_grad():
        model.up.weight[3:5] = -1e-39  # a scale of that size is 0 in bf16
        model.down.weight[7] = 0
    whole = nn.ModuleDict({"up": copy.deepcopy(model.up), "down": copy.deepcopy(model.down)})
    with chain.attach(model, recipe) as publisher:
        with torch.no_grad():
            model.up.bias.add_(1)
        publisher.publish().result()
    (named,) = (one for one in caplog.messages if "are published as 0" in one)  # once
    assert named.startswith("'up.weight': weights of at most 1.0e-39 are published as 0 in 2 of")
    found = chain.pulled()
    assert not found["up.weight"][3:5].float().any()
    assert differing(found, quantised_state(whole, recipe, ())) == set()


def test_models_that_are_quantised_already(chain: Quantised, tmp_path: Path) -> None:
    model, saved = llama(), tmp_path / "saved"
    model.save_pretrained(saved)
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ConfigError, match="LlamaForCausalLM is quantised already"):
        chain.attach(model, "fp8-block")
    config = json.loads((saved / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="the checkpoint is quantised already"):
        chain.push(saved, "int8-row")
    with pytest.raises(ConfigError, match=r"config\.json is of a quantised checkpoint"):
        chain.attach(llama(), "fp8-block", assets=saved)
    plain = Two()
    plain.up.weight = nn.Parameter(plain.up.weight.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ConfigError, match=r"'up\.weight' is F8_E4M3: quantised already"):
        chain.attach(plain, "fp8-block")


@pytest.mark.parametrize(
    ("model", "why", "hint"),
    [
        (nn.Embedding(4, 4), "no linear layer is left", ""),
        (lambda: nn.Linear(2, 2).state_dict().items(), r"no config\.json shows which", "assets="),
    ],
)
def test_what_shows_no_linear_layers(chain: Quantised, model: Any, why: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        chain.attach(model, "fp8-block")
    assert hint in caught.value.hint


def test_experts_that_a_checkpoint_has_as_one_tensor(chain: Quantised) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 40}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    config = GptOssConfig(
        num_hidden_layers=1,
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=["full_attention"],
        **sizes,
        **heads,
    )
    model = GptOssForCausalLM(config).bfloat16()
    with pytest.raises(ConfigError, match=r"'model\.layers\.0\.mlp\.experts\.down_proj'") as caught:
        chain.attach(model, "fp8-block")
    assert "ignore 'model.layers.0.mlp.experts'" in caught.value.hint
    left = Quantization("fp8-block", ignore=("lm_head", "experts"))
    with chain.attach(model, left) as publisher:
        assert publisher.version == 0


def test_code_or_scale_altered_in_the_store_is_refused(chain: Quantised) -> None:
    model = Two()
    with chain.attach(model, "fp8-block") as publisher:
        specs = chain.table.specs()
        weights = {s.name: torch.zeros(s.shape, dtype=TORCH_DTYPES[s.dtype]) for s in specs}
        Subscriber(chain.url, weights).update()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.25)  # codes and scales
        publisher.publish(step=1).result()
    held = {name: tensor.clone() for name, tensor in weights.items()}
    (part,) = (chain.folder / "chain" / "deltas").rglob("*.safetensors")
    whole = part.read_bytes()
    for at in range(len(whole) // 3, len(whole), 97):
        part.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        with pytest.raises(DigestMismatchError):
            Subscriber(chain.url, weights).update()
        assert differing(weights, held) == set()
    part.write_bytes(whole)
    Subscriber(chain.url, weights).update()
    assert not torch.equal(weights["up.weight_scale_inv"], held["up.weight_scale_inv"])


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
def test_scale_of_the_model_that_is_not_finite(value: float, chain: Quantised) -> None:
    model = Two()
    scale = torch.tensor(0.5)
    model.register_buffer("k_scale", scale)
    with chain.attach(model, "fp8-block") as publisher:
        with torch.no_grad():
            model.up.weight[0, 0] += 0.25
        scale.fill_(value)
        with pytest.raises(ConfigError, match="'k_scale' is a scale that is not finite"):
            publisher.publish(step=1)
        assert publisher.version == 0
        scale.fill_(0.75)
        assert publisher.publish(step=2).result().version == 1
    scale.fill_(value)
    with pytest.raises(ConfigError, match="'k_scale' is a scale that is not finite"):
        chain.attach(model, "fp8-block")


def test_a_config_without_the_type_of_its_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no model_type"):
        layers_of_config({"architectures": ["LlamaForCausalLM"]})


# Recipes that come with an installed package: one file, and one line of metadata

SOURCE = Path(__file__).with_name("acme_ternary.py").read_text(encoding="utf-8")

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install packages for this process, until the test ends."""

    def add(source: str, module: str = "acme_ternary", name: str = "acme.ternary") -> None:
        folder = tmp_path / f"site-{module}"
        entry = f"[{GROUP}]\n{name} = {module}:TERNARY\n"
        write_package(folder, module, source=source, entries=entry)
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, module, raising=False)

    yield add
    for module in ("acme_ternary", "acme_other"):
        sys.modules.pop(module, None)


@pytest.fixture
def known(install: Install, monkeypatch: pytest.MonkeyPatch) -> RecipeRegistry:
    """A process that starts with the package installed: its registry, for all that ask it."""
    install(SOURCE)
    fresh = RecipeRegistry(registry.RECIPES.known.values())
    for module in ("tensors", "settings"):
        monkeypatch.setattr(f"deltachain.publish.quantise.{module}.RECIPES", fresh)
    monkeypatch.setattr("deltachain.publish.ranks.sharing.RECIPES", fresh)
    return fresh


def test_an_installed_recipe_is_published_pulled_and_pushed(
    known: RecipeRegistry, chain: Quantised, tmp_path: Path
) -> None:
    assert "acme_ternary" not in sys.modules
    assert "acme.ternary" in set(known)
    assert "acme_ternary" not in sys.modules, "a list of names imports nothing"
    model = llama()
    with chain.attach(model, "acme.ternary") as publisher:
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[3] *= -1.5
        assert publisher.publish(step=1).result().kind == "delta"
    assert "acme_ternary" in sys.modules
    ok("verify", chain.url)
    found = chain.pulled(1)
    assert not any(name.endswith("up_proj.weight") for name in found)
    for name, layer in model.named_modules():
        if f"{name}.ternary" in found:
            weight = layer.weight.detach().float()
            near = dense(found, name)
            assert set(near[weight.abs() == weight.abs().max()].sign().tolist()) <= {-1.0, 1.0}
            assert torch.cosine_similarity(near.flatten(), weight.flatten(), dim=0) > 0.7
    assert chain.config() == {"quant_method": "acme", "leave": ["lm_head"]}
    record = {"recipe": "acme.ternary", "library": "acme_ternary", "version": "1.0"}
    assert chain.table.ext["quantization"] == record
    model.save_pretrained(tmp_path / "saved")
    again = ok("push", tmp_path / "saved", chain.url, "--quantization", "acme.ternary")
    assert "nothing to do" in again.stdout
    other = invoke("push", tmp_path / "saved", chain.url, "--quantization", "nvfp4a16")
    assert other.code != 0
    assert "recipe acme.ternary of acme_ternary 1.0" in " ".join(other.stderr.split())


def test_windows_of_four_codes_in_a_byte_are_those_of_the_whole(install: Install) -> None:
    install(SOURCE)
    for seed, shape in enumerate([(60, 48), (1, 200), (33, 8)]):
        values = heavy(shape, torch.Generator().manual_seed(seed)).bfloat16()
        expected = in_windows(TERNARY, values, [Box.whole(shape)])
        assert {name: tuple(one.shape) for name, one in expected.items()} == {
            "layer.ternary": (shape[0], shape[1] // 4),
            "layer.ternary_scale": (shape[0], shape[1] // 8),
            "layer.ternary_over": (1,),
        }
        parts = list(windows(shape, random.Random(seed), TERNARY))
        assert differing(in_windows(TERNARY, values, parts), expected) == set(), parts


# The registry


def test_a_recipe_that_nobody_has_is_answered_with_those_there_are(install: Install) -> None:
    install(SOURCE)
    with pytest.raises(ConfigError, match="no such recipe") as caught:
        RecipeRegistry([INT8_ROW]).chosen("acme")
    assert caught.value.hint.startswith("expected one of: acme.ternary, int8-row")
    assert "acme_ternary" not in sys.modules


def test_a_recipe_that_cannot_be_is_named(install: Install) -> None:
    install(SOURCE.replace("(1, 4)", "(1, 3)"))
    known = RecipeRegistry([INT8_ROW])
    with pytest.raises(ConfigError, match="3 columns") as caught:
        known.chosen("acme.ternary")
    assert "acme_ternary 1.0" in str(caught.value)
    assert caught.value.hint == "repair that package"
