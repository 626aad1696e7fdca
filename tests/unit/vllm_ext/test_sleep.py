"""A vLLM server that is put to sleep: unready, written nothing, and proven as it wakes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.testclient import TestClient

from deltachain.control.server import Control
from deltachain.replica.leader import Leader
from deltachain_vllm.endpoint import attach_sleep
from tests.unit.control.replicas import followed, leader_of
from tests.unit.replica.replicas import Followed


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Followed]:
    yield from followed(tmp_path)


@pytest.fixture
def leader(here: Followed, monkeypatch: pytest.MonkeyPatch) -> Iterator[Leader]:
    engine: Any = here.engine
    monkeypatch.setattr(
        engine, "fall_asleep", lambda: setattr(engine, "asleep", True), raising=False
    )
    yield from leader_of(here)


@pytest.fixture
def server(leader: Leader) -> TestClient:
    """With routes as vLLM's development mode has them, behind ours as it puts those."""
    app = FastAPI()

    @app.post("/sleep")
    async def sleep(raw_request: Request, level: Annotated[int, Query(ge=0, le=2)] = 1) -> int:
        del raw_request
        if level == 2:
            raise HTTPException(500, "cannot")
        return level

    @app.post("/wake_up")
    async def wake_up(raw_request: Request) -> list[str]:
        return raw_request.query_params.getlist("tags")

    known = [*app.routes]
    attach_sleep(app)
    ours = [route for route in app.routes if route not in known]
    assert len(ours) == 2
    app.router.routes[:] = [*ours, *known]
    app.state.deltachain = Control(leader, "", token="", is_open=True)
    leader.update()
    assert leader.status().ready
    return TestClient(app)


def test_a_sleeping_replica_is_not_ready_until_all_of_it_is_awake(
    server: TestClient, leader: Leader, here: Followed
) -> None:
    assert server.post("/sleep").json() == 1
    assert leader.status().reason == "asleep: the engine has released its kv_cache, weights"
    assert getattr(here.engine, "asleep")  # noqa: B009 - set by the fixture
    assert server.post("/wake_up?tags=weights").json() == ["weights"]
    assert not getattr(here.engine, "asleep")  # noqa: B009
    assert not leader.status().ready
    server.post("/wake_up?tags=kv_cache")
    assert leader.status().ready


def test_weights_that_were_lost_in_its_sleep_are_healed_as_it_wakes(
    server: TestClient, leader: Leader, here: Followed
) -> None:
    here.anchor()
    server.post("/sleep?level=1")
    here.scribble(0, "layers.0.norm.weight")
    server.post("/wake_up")
    assert leader.status().ready
    assert here.holds(2)


def test_a_server_that_only_stops_generating_is_not_ready_either(
    server: TestClient, leader: Leader
) -> None:
    server.post("/sleep?level=0")
    assert not leader.status().ready
    server.post("/wake_up")
    assert leader.status().ready


def test_a_sleep_that_fails_leaves_it_ready(server: TestClient, leader: Leader) -> None:
    assert server.post("/sleep?level=2").status_code == 500
    assert leader.status().ready


def test_what_the_route_refuses_changes_nothing(server: TestClient, leader: Leader) -> None:
    assert server.post("/sleep?level=9").status_code == 422
    assert leader.status().ready
