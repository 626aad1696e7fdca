"""SGLang's own way to ask for a version: guarded by its key, or else by our token."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.requests import Request

from deltachain.control.server import Control
from deltachain.replica.leader import Leader
from deltachain_sglang import compat, front
from tests.unit.control.replicas import followed, leader_of
from tests.unit.replica.replicas import Followed

TOKEN = "one that nobody guesses"  # noqa: S105


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Followed]:
    yield from followed(tmp_path)


@pytest.fixture
def leader(here: Followed) -> Iterator[Leader]:
    yield from leader_of(here)


async def _never(*_: object) -> Any:
    raise NotImplementedError


async def _nothing_more() -> Any:
    await asyncio.sleep(60)


def asked_of(path: str, headers: dict[str, str]) -> tuple[bool, str]:
    """What SGLang answers to ``/update_weights_from_disk``."""
    given = {"host": "a", **headers}  # as every client of HTTP 1.1 sends it
    pairs = [(name.encode(), value.encode()) for name, value in given.items()]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": pairs, "server": ("a", 1)}
    request = Request({**scope, "query_string": b"", "scheme": "http"}, _nothing_more)
    told = front.on_update(_never, None, SimpleNamespace(model_path=path), request)
    done, message, _ = asyncio.run(told)
    return done, message


@pytest.mark.parametrize(
    ("is_guarded", "headers", "done"),
    [
        (False, {}, False),
        (False, {"authorization": "Bearer wrong"}, False),
        (False, {"authorization": f"Bearer {TOKEN}"}, True),
        (False, {"x-deltachain-token": TOKEN}, True),
        (True, {}, True),  # SGLang has asked for its key before
    ],
)
def test_a_version_needs_the_token_where_no_key_guards_the_route(
    leader: Leader,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_guarded: bool,
    headers: dict[str, str],
    done: bool,
) -> None:
    app = FastAPI()
    control = Control(leader, "", token=TOKEN, is_open=False, is_guarded=is_guarded)
    app.state.deltachain = control
    monkeypatch.setattr(compat, "app", lambda: app)
    found, message = asked_of("deltachain:1", headers)
    assert found is done
    assert leader.subscriber.version == (1 if done else None)
    assert TOKEN not in message


@pytest.mark.parametrize("named", ["-1", "1.5", "file:///etc", "9" * 5000, "\u0661", " 1"])
def test_what_is_no_version_is_refused(
    leader: Leader, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    app = FastAPI()
    app.state.deltachain = Control(leader, "", token="", is_open=True, is_guarded=True)
    monkeypatch.setattr(compat, "app", lambda: app)
    found, message = asked_of(f"deltachain:{named}", {})
    assert not found
    assert "is no version" in message
    assert len(message) < 200
