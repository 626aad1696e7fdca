"""The benchmark runs, and what it measures is proven: at sizes whose figures mean nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[3]


def test_every_candidate_has_a_figure() -> None:
    arguments = ("--sizes", "2M", "--rounds", "1", "--windows", "1", "--lost-size", "2M", "--json")
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.bench", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr  # 1: a swap was slow, and at this size may be
    found = json.loads(done.stdout)
    (plain,) = found["applied"]
    assert set(plain["classes"]) == {"in_place"}
    assert len(plain["seconds"]) == 3
    assert {"load_weights", "layerwise reload"} <= plain["seconds"]["4"].keys()
    assert all(one["proven"] for one in found["applied"] + found["lost"])
    assert all(len(one["updating_s"]) == 1 for one in found["lost"])
