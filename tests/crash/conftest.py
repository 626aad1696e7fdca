from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.crash.places import KINDS, Place, open_place

CHILD = Path(__file__).with_name("child.py")


@pytest.fixture
def killed() -> Callable[..., None]:
    """Run a process that must end by SIGKILL, and by nothing else."""

    def run(**job: Any) -> None:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        done = subprocess.run(
            [sys.executable, CHILD, json.dumps(job)],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr

    return run


@pytest.fixture
def place_of(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Place]:
    """Somewhere new to keep chains in, of a kind."""
    return lambda kind: open_place(kind, tmp_path, request.getfixturevalue, monkeypatch.setenv)


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, place_of: Callable[[str], Place]) -> Place:
    """Somewhere new to keep chains in, one kind after the other."""
    return place_of(request.param)
