from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.hub.server import HubServer
from tests.support.seaweed import Seaweed


@pytest.fixture(params=["folder", "s3", "hub"])
def board_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty store of each kind."""
    if request.param == "folder":
        return str(tmp_path / "replicas")
    monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    if request.param == "s3":
        seaweed: Seaweed = request.getfixturevalue("seaweed")
        for name, value in seaweed.env().items():
            monkeypatch.setenv(name, value)
        make: Callable[[], str] = request.getfixturevalue("s3_url")
        return make()
    hub: HubServer = request.getfixturevalue("hub")
    for name, value in hub.env().items():
        monkeypatch.setenv(name, value)
    return f"hf://buckets/{request.getfixturevalue('bucket')}/replicas"
