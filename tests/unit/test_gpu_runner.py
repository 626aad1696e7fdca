"""The GPU runner works where there is no card, as far as it can."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deltachain.kernels import device
from tests.gpu.bench import bench
from tests.gpu.diff import MOE_18K, ModelShape, bench_diff
from tests.gpu.ranks import checks, snapshot_checks
from tests.gpu.update import bench_update

RANKS = dict(checks("cpu"))
ROOT = Path(__file__).resolve().parents[2]


def test_the_benchmark_runs_on_any_torch_device() -> None:
    figures = bench("cpu", numel=1 << 16)
    assert figures["nnz"] > 0
    assert all(isinstance(value, float | int) for value in figures.values())


def test_the_benchmark_of_diffs_runs_on_any_torch_device() -> None:
    figures = bench_diff("cpu", divisor=1 << 16)
    assert figures["floors"].keys() == {
        "device_copy_gbps",
        "host_to_device_gbps",
        "device_to_host_gbps",
    }
    diffs = {name: of for name, of in figures.items() if name != "floors"}
    assert len(diffs) == 4
    assert {of["tensors"] for of in diffs.values()} == {291, 18_721}
    assert all(of["changes"] > 0 and of["waits"] == 2 for of in diffs.values())


def test_the_benchmark_of_updates_runs_on_any_torch_device() -> None:
    shape = ModelShape("some of a model", MOE_18K.numels[:50])
    (figures,) = bench_update("cpu", divisor=1 << 10, shapes=[shape]).values()
    assert figures["tensors"] == 50
    assert figures["changes"] > 0
    assert figures["swap_seconds"] > 0


@pytest.mark.parametrize("check", [pytest.param(c, id=n) for n, c in snapshot_checks("cpu")])
def test_a_snapshot_is_checked_on_any_torch_device(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("name", RANKS)
def test_a_rank_is_checked_on_any_torch_device(
    name: str, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a card would have it: no numpy, all of its bits in torch's hands."""
    if not on_host:
        monkeypatch.setattr(device, "on_host", lambda _: False)
    RANKS[name]()


def test_without_a_card_the_runner_says_so_and_fails() -> None:
    command = [sys.executable, "-m", "tests.gpu.run", "test"]
    blind = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=blind, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no CUDA device" in done.stderr


def test_the_runner_needs_only_torch_and_numpy() -> None:
    code = "import sys, tests.gpu.run; print(sorted(m.partition('.')[0] for m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for package in ("blake3", "msgspec", "zstandard", "safetensors", "pytest", "rich"):
        assert f"'{package}'" not in done.stdout
