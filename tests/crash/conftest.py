import os
import signal
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import pytest

from tests.crash.child import KINDS, Place, open_place, run_job

PROCESSES: Final = get_context("forkserver")
"""Has what children import imported once: torch alone takes longer than what a child does."""

PROCESSES.set_forkserver_preload(["tests.crash.child", "numba"])


@pytest.fixture
def killed(tmp_path: Path) -> Callable[..., None]:
    printed = tmp_path / "printed-by-the-child"

    def run(**job: Any) -> None:
        child = PROCESSES.Process(target=run_job, args=(job, dict(os.environ), printed))
        child.start()
        child.join(300)
        assert child.exitcode == -signal.SIGKILL, printed.read_text(encoding="utf-8")

    return run


@pytest.fixture
def place_of(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Place]:
    return lambda kind: open_place(kind, tmp_path, request.getfixturevalue, monkeypatch.setenv)


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, place_of: Callable[[str], Place]) -> Place:
    return place_of(request.param)
