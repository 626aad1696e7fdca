"""Programs that have an engine in process, each run in an interpreter of its own."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.engines.serving import ROOT


def run_program(
    module: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
