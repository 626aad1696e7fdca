"""A real server writes its presence, and takes it away when it is told to end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from deltachain.presence.record import PresenceRecord, parse_record
from tests.engines.replica import serving
from tests.engines.serving import ENGINE
from tests.engines.trainer import Trainer

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_a_server_shows_its_presence_until_it_is_told_to_end(tmp_path: Path) -> None:
    board = tmp_path / "replicas"
    variables = {"DELTACHAIN_PRESENCE_URL": str(board)}
    with Trainer(tmp_path) as trainer, serving(trainer, tmp_path, environment=variables) as replica:
        (file,) = board.glob("*.json")
        record = _ready(file)
        asked = replica.server.status()
        assert record.status.version == asked["version"] == 0
        assert record.status.chain == asked["chain"]
        assert record.status.engine == asked["engine"]
        assert record.status.engine.startswith(f"{ENGINE}/")
        replica.server.stop()
        assert not file.exists(), replica.server.log()[-3000:]


def _ready(file: Path) -> PresenceRecord:
    until = time.monotonic() + 60
    while not (record := parse_record(file.read_bytes(), file.name)).status.ready:
        assert time.monotonic() < until
        time.sleep(0.1)
    return record
