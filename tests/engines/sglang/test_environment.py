"""What ``make venv-sglang`` built is what the tests beside this one need."""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import sglang

import deltachain
import deltachain_sglang
from deltachain_sglang.compat import check_version

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[3]
LOCK = ROOT / "tests/engines/sglang.txt"


def pins() -> list[str]:
    lines = LOCK.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and line[0] != "#"]


def test_sglang_is_the_pinned_one_and_supported() -> None:
    assert f"sglang=={sglang.__version__}" in pins()
    assert check_version() == sglang.__version__


def test_every_package_is_the_pinned_one() -> None:
    names = [pin.partition("==")[0] for pin in pins()]
    installed = [importlib.metadata.version(name).partition("+")[0] for name in names]
    assert [f"{name}=={version}" for name, version in zip(names, installed, strict=True)] == pins()


def test_torch_is_one_for_cpus() -> None:
    assert re.search(r"\+cpu$", importlib.metadata.version("torch"))


def test_deltachain_is_that_of_this_clone() -> None:
    assert ROOT in Path(deltachain.__file__).parents


def test_sglang_finds_the_entry_point() -> None:
    found = {one.name: one.load() for one in entry_points(group="sglang.srt.plugins")}
    assert found["deltachain"] is deltachain_sglang.register


def test_spawned_processes_find_sglang_and_deltachain() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.map(importlib.metadata.version, ["sglang", "deltachain"])
    assert found == [importlib.metadata.version(name) for name in ("sglang", "deltachain")]
