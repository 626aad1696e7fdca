from pathlib import Path

import pytest

from deltachain.chain import commits
from tests.crash.child import Place, open_place


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "AGAIN_S", 0.0)


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return open_place(request.param, tmp_path, request.getfixturevalue, monkeypatch.setenv)
