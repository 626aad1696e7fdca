from __future__ import annotations

import pytest

from deltachain.chain import commits


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second look comes at once: no store here lags."""
    monkeypatch.setattr(commits, "AGAIN_S", 0.0)
