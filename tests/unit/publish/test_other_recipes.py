"""A recipe comes with an installed package: one file, and one line of metadata."""

import importlib.metadata
import json
import logging
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deltachain.chain.chain import Chain
from deltachain.errors import ChainMismatchError, ConfigError
from deltachain.publish import PublishConfig, Publisher
from deltachain.publish.model.layout import Box
from deltachain.publish.quantise import settings as registry
from deltachain.publish.quantise.compressed import INT8_ROW
from deltachain.publish.quantise.settings import GROUP, Quantization, RecipeRegistry
from deltachain.store import open_store
from tests.unit.cli.support import invoke, ok
from tests.unit.publish.acme_ternary import TERNARY, dense
from tests.unit.publish.library import differing, llama
from tests.unit.publish.test_quantise import heavy, in_windows, windows

HERE = Path(__file__).parent
SOURCE = (HERE / "acme_ternary.py").read_text(encoding="utf-8")

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install packages for this process, until the test ends."""

    def add(source: str, module: str = "acme_ternary", name: str = "acme.ternary") -> None:
        folder = tmp_path / f"site-{module}"
        folder.mkdir()
        (folder / f"{module}.py").write_text(source)
        info = folder / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {module}:TERNARY\n")
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, module, raising=False)

    yield add
    for module in ("acme_ternary", "acme_other"):
        sys.modules.pop(module, None)


@pytest.fixture
def known(install: Install, monkeypatch: pytest.MonkeyPatch) -> RecipeRegistry:
    """A process that starts with the package installed: its registry, for all that ask it."""
    install(SOURCE)
    fresh = RecipeRegistry(registry.RECIPES.values())
    for module in ("tensors", "settings"):
        monkeypatch.setattr(f"deltachain.publish.quantise.{module}.RECIPES", fresh)
    monkeypatch.setattr("deltachain.publish.ranks.sharing.RECIPES", fresh)
    return fresh


def test_an_installed_recipe_is_published_pulled_and_pushed(
    known: RecipeRegistry, tmp_path: Path
) -> None:
    assert "acme_ternary" not in sys.modules
    assert "acme.ternary" in set(known)
    assert "acme_ternary" not in sys.modules, "a list of names imports nothing"
    model, url = llama(), str(tmp_path / "chain")
    with Publisher(PublishConfig(url=url, quantization="acme.ternary")).attach(model) as publisher:
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[3] *= -1.5
        assert publisher.publish(step=1).result().kind == "delta"
    assert "acme_ternary" in sys.modules
    ok("verify", url)
    ok("pull", url, "--out", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert not any(name.endswith("up_proj.weight") for name in found)
    for name, layer in model.named_modules():
        if f"{name}.ternary" in found:
            weight = layer.weight.detach().float()
            near = dense(found, name)
            assert set(near[weight.abs() == weight.abs().max()].sign().tolist()) <= {-1.0, 1.0}
            assert torch.cosine_similarity(near.flatten(), weight.flatten(), dim=0) > 0.7
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "acme", "leave": ["lm_head"]}
    table = Chain.open(open_store(url)).table
    assert table.ext["quantization"] == {
        "recipe": "acme.ternary",
        "library": "acme_ternary",
        "version": "1.0",
    }
    model.save_pretrained(tmp_path / "saved")
    again = ok("push", tmp_path / "saved", url, "--quantization", "acme.ternary")
    assert "nothing to do" in again.stdout
    other = invoke("push", tmp_path / "saved", url, "--quantization", "nvfp4a16")
    assert other.code != 0
    assert "recipe acme.ternary of acme_ternary 1.0" in " ".join(other.stderr.split())


def test_a_package_of_another_version_does_not_continue_the_chain(
    known: RecipeRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = PublishConfig(url=str(tmp_path / "chain"), quantization="acme.ternary")
    Publisher(config).attach(llama()).close()
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda n: "1.1" if n == "acme_ternary" else real(n)
    )
    with pytest.raises(ChainMismatchError, match=r"acme_ternary 1\.1") as caught:
        Publisher(config).attach(llama())
    assert "acme_ternary==1.0" in caught.value.hint
    assert known["acme.ternary"].version() == "1.1"


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


@pytest.mark.parametrize(
    "name", ["acme", "acme_ternary", "acme_ternary:TERNARY", "os", "", "a" * 9000]
)
def test_a_name_imports_nothing_but_its_own_entry_point(install: Install, name: str) -> None:
    install(SOURCE)
    known = RecipeRegistry([INT8_ROW])
    assert name not in known
    with pytest.raises(ConfigError, match="no such recipe") as caught:
        known.chosen(name)
    assert caught.value.hint.startswith("expected one of: acme.ternary, int8-row")
    assert "acme_ternary" not in sys.modules


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("raise ImportError('no such library')", "no such library"),
        ("TERNARY = 7", "not a Recipe of that name"),
        ("from deltachain.publish.quantise.compressed import INT8_ROW as TERNARY", "not a Recipe"),
        (SOURCE.replace("(1, 4)", "(1, 3)"), "3 columns"),
        (SOURCE.replace('"acme.ternary"', '"acme.other"'), "not a Recipe of that name"),
        ("", "no attribute"),
    ],
)
def test_a_package_that_does_not_load_is_named(
    install: Install, source: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    install(source)
    known = RecipeRegistry([INT8_ROW])
    with caplog.at_level(logging.WARNING):
        assert ["acme.ternary" in known for _ in range(3)] == [False] * 3
    assert len(caplog.records) == 1
    with pytest.raises(ConfigError, match=why) as caught:
        known.chosen("acme.ternary")
    assert "acme_ternary 1.0" in str(caught.value)
    assert caught.value.hint == "repair that package"
    assert set(known) == {"int8-row"}


def test_two_packages_with_one_name_are_refused(install: Install) -> None:
    install(SOURCE)
    install(SOURCE, "acme_other")
    with pytest.raises(ConfigError, match="several packages provide it"):
        RecipeRegistry([]).chosen("acme.ternary")
    assert {"acme_ternary", "acme_other"}.isdisjoint(sys.modules)


def test_a_package_takes_no_name_without_a_dot(install: Install) -> None:
    install(SOURCE.replace('"acme.ternary"', '"ternary"'), name="ternary")
    with pytest.raises(ConfigError, match="dots between"):
        RecipeRegistry([INT8_ROW]).chosen("ternary")


def test_a_recipe_is_registered_for_this_process() -> None:
    known = RecipeRegistry([INT8_ROW])
    known.register(TERNARY)
    known.register(TERNARY)
    assert known["acme.ternary"] is TERNARY
    with pytest.raises(ConfigError, match="dots between"):
        known.register(INT8_ROW)
    with pytest.raises(ConfigError, match=r"'acme\.ternary': no such recipe"):
        Quantization("acme.ternary")
