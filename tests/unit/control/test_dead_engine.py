"""Routes of a replica whose engine is dead, while its server still answers."""

from __future__ import annotations

from fastapi.testclient import TestClient

from deltachain.replica.leader import Leader
from tests.unit.control.replicas import app_of
from tests.unit.replica.replicas import Followed

PREFIX = "/v1/deltachain"


def test_a_replica_whose_engine_is_dead_is_not_ready(here: Followed, leader: Leader) -> None:
    leader.start()
    with TestClient(app_of(leader, is_open=True), base_url="http://127.0.0.1:8000") as http:
        paths = (f"{PREFIX}/ready", f"{PREFIX}/readyz", "/readyz/deltachain")
        assert [http.get(path).status_code for path in paths] == [200] * 3
        here.engine.dead = True
        assert [http.get(path).status_code for path in paths] == [503] * 3
        assert http.get(paths[0]).json()["reason"] == "the engine is dead"
        assert http.get(f"{PREFIX}/status").json()["ready"] is False
