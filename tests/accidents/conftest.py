from __future__ import annotations

import pytest

from deltachain.chain import commits


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "AGAIN_S", 0.0)
