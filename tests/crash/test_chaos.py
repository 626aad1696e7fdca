"""Three minutes of chaos: `make chaos` runs for two hours."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash.chaos.scene import KINDS, ROOT


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(
    not all((ROOT / f".venv-{kind}/bin/python").exists() for kind in KINDS),
    reason="needs both engines: make venv-vllm venv-sglang",
)
def test_three_minutes_of_chaos_leave_nothing_unexplained(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.crash.chaos", "--minutes", "3", "--seed", "7"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("0 failures\n")
    apart = re.search(r"^([\d,]+) of ([\d,]+) answers tried", done.stdout, re.MULTILINE)
    assert apart, done.stdout
    assert apart[1] != "0", "the judge never told a version from the one before"
