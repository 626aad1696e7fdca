"""A publisher that quantises: the chain is the checkpoint that the recipe's library writes."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from deltachain.chain.chain import Chain
from deltachain.cli.pull import pull
from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.push import push
from deltachain.publish.quantise.settings import RECIPES, Quantization
from deltachain.store import open_store
from tests.ranks.settings_trials import mixture
from tests.unit.publish.library import COMPRESSED, PRESETS, differing, llama, quantised_state


def pulled(url: str, folder: Path, version: int) -> dict[str, Tensor]:
    out = folder / f"pulled-{version}"
    pull(url, out=out, version=version)
    return load_file(out / "model.safetensors")


def step_(model: nn.Module, seed: int, size: float = 5e-5) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator) * size
            parameter.add_(drawn.to(parameter.dtype))


def expected_of(model: nn.Module, recipe: str) -> dict[str, Tensor]:
    return quantised_state(copy.deepcopy(model).bfloat16(), recipe)


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_every_version_is_what_the_library_writes(recipe: str, tmp_path: Path) -> None:
    model = llama().float()  # masters
    url = str(tmp_path / "chain")
    config = PublishConfig(url=url, quantization=recipe, dtype="BF16")
    with Publisher(config).attach(model) as publisher:
        assert differing(pulled(url, tmp_path, 0), expected_of(model, recipe)) == set()
        for number in (1, 2):
            step_(model, number)
            before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            publisher.publish(step=number).result()
            assert differing(before, dict(model.state_dict())) == set(), "masters stay untouched"
            found = pulled(url, tmp_path, number)
            assert differing(found, expected_of(model, recipe)) == set()


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_configuration_names_the_recipe_and_what_it_leaves(recipe: str, tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=True)
    url = str(tmp_path / "chain")
    Publisher(PublishConfig(url=url, quantization=recipe)).attach(model).close()
    pull(url, out=tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    left = "ignore" if "ignore" in config else "modules_to_not_convert"
    assert config[left] == ["lm_head"]
    table = Chain.open(open_store(url)).table
    assert table.ext == {"quantization": dict(RECIPES[recipe].record())}
    assert table.aliases == {"lm_head.weight": "model.embed_tokens.weight"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", sorted(COMPRESSED | PRESETS))
def test_transformers_loads_what_is_pulled(recipe: str, tmp_path: Path) -> None:
    model, twin = llama(), llama()
    url = str(tmp_path / "chain")
    Publisher(PublishConfig(url=url, quantization=recipe)).attach(model).close()
    pull(url, out=tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    tokens = torch.arange(12)[None]
    quantised_state(twin, recipe)
    near, _ = loaded(tokens).logits, twin(tokens)  # which makes both decompress their weights
    assert torch.cosine_similarity(near, model(tokens).logits, dim=-1).min() > 0.9
    assert differing(dense(loaded), dense(twin)) == set()
    weight = model.model.layers[0].mlp.up_proj.weight
    assert not torch.equal(dense(loaded)["model.layers.0.mlp.up_proj"], weight)


def dense(model: nn.Module) -> dict[str, Tensor]:
    """Weights that the library decompressed to."""
    return {
        name: layer.weight.detach()
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    }


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_a_pushed_checkpoint_equals_a_published_model(recipe: str, tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "0")
    url = str(tmp_path / "chain")
    config = PublishConfig(url=url, quantization=recipe)
    first = push(open_store(url, writer=True), tmp_path / "0", config)
    assert [one.version for one in first.committed] == [0]
    assert differing(pulled(url, tmp_path, 0), expected_of(model, recipe)) == set()
    step_(model, 1)
    model.save_pretrained(tmp_path / "1")
    second = push(open_store(url, writer=True), tmp_path / "1", config)
    assert [one.manifest.edge.kind for one in second.committed] == ["delta"]
    assert differing(pulled(url, tmp_path, 1), expected_of(model, recipe)) == set()


def test_a_publisher_continues_its_chain_without_an_anchor(tmp_path: Path) -> None:
    model, url = llama(), str(tmp_path / "chain")
    config = PublishConfig(url=url, quantization="fp8-block")
    Publisher(config).attach(model).close()
    step_(model, 1)
    with Publisher(config).attach(model) as publisher:
        assert (publisher.version, publisher.last) == (2, None)
    assert differing(pulled(url, tmp_path, 2), expected_of(model, "fp8-block")) == set()


def test_layers_can_be_left_as_they_are(tmp_path: Path) -> None:
    model, url = llama(), str(tmp_path / "chain")
    chosen = Quantization("fp8-row", ignore=("lm_head", "o_proj", "re:model.layers.1.mlp"))
    Publisher(PublishConfig(url=url, quantization=chosen)).attach(model).close()
    ignored = tuple(
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and chosen.ignores(name)
    )
    assert len(ignored) == 1 + 2 + 3
    expected = quantised_state(copy.deepcopy(model), "fp8-row", ignored)
    assert differing(pulled(url, tmp_path, 0), expected) == set()
    config = json.loads((tmp_path / "pulled-0" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == sorted(ignored)


@pytest.mark.parametrize("recipe", ["fp8-block", "int8-row", "nvfp4a16"])
def test_experts_are_quantised_one_by_one_and_routers_are_not(recipe: str, tmp_path: Path) -> None:
    model = mixture().bfloat16()
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    layers = {name.removesuffix(".weight"): one for name, one in saved.items() if one.ndim == 2}
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
    whole = {name: one for name, one in saved.items() if name.removesuffix(".weight") in kept}
    whole |= {name: one for name, one in saved.items() if one.ndim != 2}
    expected = whole | {name.replace("/", "."): one for name, one in quantised.items()}
    url = str(tmp_path / "chain")
    Publisher(PublishConfig(url=url, quantization=recipe)).attach(model).close()
    assert differing(pulled(url, tmp_path, 0), expected) == set()
    config = json.loads((tmp_path / "pulled-0" / "config.json").read_text())
    left = config["quantization_config"]
    assert left.get("ignore", left.get("modules_to_not_convert")) == [
        "lm_head",
        "model.layers.0.mlp.gate",
    ]
    pushed = push(
        open_store(f"{url}-2", writer=True),
        tmp_path / "saved",
        PublishConfig(url=f"{url}-2", quantization=recipe),
    )
    assert differing(pulled(f"{url}-2", tmp_path / "2", 0), expected) == set()
    assert pushed.chain.table.tensors == Chain.open(open_store(url)).table.tensors


def test_an_export_is_quantised_by_its_configuration(tmp_path: Path) -> None:
    model, url = llama(), str(tmp_path / "chain")
    model.save_pretrained(tmp_path / "saved")
    config = PublishConfig(url=url, quantization="int8-row", assets=tmp_path / "saved")

    def export() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in model.state_dict().items():
            yield name, tensor.clone()

    with Publisher(config).attach(export) as publisher:
        step_(model, 1)
        publisher.publish(step=1).result()
    assert differing(pulled(url, tmp_path, 1), expected_of(model, "int8-row")) == set()


def test_a_pushed_output_layer_that_is_tied_is_left_by_name(tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "0")  # without lm_head.weight
    url = str(tmp_path / "chain")
    push(
        open_store(url, writer=True), tmp_path / "0", PublishConfig(url=url, quantization="fp8-row")
    )
    pull(url, out=tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_bytes())
    assert config["quantization_config"]["ignore"] == ["lm_head"]


def test_a_scale_that_moves_changes_its_block_alone(tmp_path: Path) -> None:
    model = nn.Linear(512, 640, bias=False)  # its weight is called `weight`
    url = str(tmp_path / "chain")
    config = PublishConfig(url=url, quantization="fp8-block", dtype="BF16")
    with Publisher(config).attach(model) as publisher:
        with torch.no_grad():
            model.weight[200, 300] = 0.75  # in the block of rows 128 to 255, columns 256 to 383
        receipt = publisher.publish(step=1).result()
    assert receipt.kind == "delta"
    before, after = pulled(url, tmp_path, 0), pulled(url, tmp_path, 1)
    scales = before["weight_scale_inv"] != after["weight_scale_inv"]
    assert scales.nonzero().tolist() == [[1, 2]]
    rows, columns = (
        before["weight"].view(torch.uint8) != after["weight"].view(torch.uint8)
    ).nonzero(as_tuple=True)
    assert set((rows // 128).tolist()) == {1}
    assert set((columns // 128).tolist()) == {2}
    assert rows.numel() > 0.9 * 128 * 128, "dense there"
    assert receipt.nnz == rows.numel() + 1
