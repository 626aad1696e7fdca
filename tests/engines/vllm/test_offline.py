"""Chains that were trained for real, followed inside vLLM: every version exact, and back again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines.chains import NAMES, train

pytestmark = pytest.mark.engine

VERSIONS = 20
RATE = 3e-5
"""Ten times the usual one: tokens must tell versions apart."""
ROOT = Path(__file__).resolve().parents[3]


def follow(family: str, folder: Path, *options: str) -> dict[str, Any]:
    """What an offline ``LLM`` saw on the way through a new chain; see ``offline.Seen``."""
    chain = train(family, folder, VERSIONS, rate=RATE)
    command = [sys.executable, "-m", "tests.engines.vllm.offline", chain.url, str(chain.base)]
    done = subprocess.run(
        [*command, *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=420,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def check(seen: dict[str, Any], ranks: int) -> None:
    """Every version was held exactly, on every rank, and so were those that were gone back to."""
    assert seen["held"] == 0
    assert seen["wrong"] == {str(v): [[]] * ranks for v in range(1, VERSIONS + 1)}
    assert seen["named"] == {str(v): str(v) for v in range(1, VERSIONS + 1)}
    assert seen["back"] == {str(v): [[]] * ranks for v in (VERSIONS - 1, VERSIONS - 2, 0)}
    assert seen["scrubbed"] == [True] * 3


@pytest.mark.parametrize("family", NAMES)
def test_a_trained_chain_is_followed_exactly_and_back(family: str, tmp_path: Path) -> None:
    seen = follow(family, tmp_path)
    check(seen, 1)
    assert set(seen["classes"]) == {"in_place"}
    assert seen["unlike"] == {str(v): [] for v in range(1, VERSIONS + 1)}
    assert seen["different"] > 1


def test_packed_linears_are_reloaded_and_exact(tmp_path: Path) -> None:
    """Stock vLLM on a CPU: nothing but tokens can be seen of what it computes from."""
    seen = follow("qwen3", tmp_path, "--stock")
    assert seen["classes"]["reloaded"] >= 16
    assert seen["unlike"] == {str(v): [] for v in range(1, VERSIONS + 1)}
    assert seen["different"] > 1
    assert seen["scrubbed"] == [True] * 3


@pytest.mark.parametrize("family", ["qwen3", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_two_ranks_follow_exactly_and_back(family: str, tmp_path: Path) -> None:
    check(follow(family, tmp_path, "--tp", "2"), 2)
