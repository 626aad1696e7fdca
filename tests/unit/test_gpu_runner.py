"""The GPU runner works where there is no card, as far as it can."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from deltachain.kernels import torch_kernels
from tests.gpu.end_to_end import bench_end_to_end
from tests.gpu.ranks import checks, snapshot_checks

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("cpu", "cpu:0")
"""Devices without an index and with one; torch takes both, and tells tensors' without."""


def named(checks: Callable[[str], Iterable[tuple[str, Callable[[], None]]]]) -> list[ParameterSet]:
    return [pytest.param(c, id=f"{where}.{n}") for where in PLACES for n, c in checks(where)]


@pytest.mark.full
@pytest.mark.parametrize("check", named(snapshot_checks))
def test_a_snapshot_is_checked_on_any_torch_device(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("check", named(checks))
def test_a_rank_is_checked_on_any_torch_device(
    check: Callable[[], None], on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a card would have it: no numpy, all of its bits in torch's hands."""
    if not on_host:
        monkeypatch.setattr(torch_kernels, "on_host", lambda _: False)
    check()


@pytest.mark.full
def test_the_benchmark_of_a_trainer_and_a_replica_compares_every_bit() -> None:
    figures = dict(bench_end_to_end("cpu", 16))
    assert 0 < figures["snapshot on the host"]["changed"] < 1


@pytest.mark.full
def test_without_a_card_the_runner_says_so_and_fails() -> None:
    command = [sys.executable, "-m", "tests.gpu.run", "test"]
    blind = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=blind, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no CUDA device" in done.stderr
