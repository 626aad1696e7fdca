import asyncio
import gzip
import os
import time
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import msgspec
import pytest
import torch
from fastapi import FastAPI, Response
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient

from deltachain.control.announce import Fleet
from deltachain.control.replica_client import ReplicaClient
from deltachain.control.schemas import PREFIXES
from deltachain.errors import ConfigError, ControlPlaneError
from deltachain.replica.leader import Leader
from tests.unit.control.replicas import app_of, followed, leader_of, served
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


TOKEN = "one that nobody guesses"  # noqa: S105
CALLERS = 500
SECONDS = 60.0
GROWTH = 64 << 20


@pytest.mark.slow
def test_500_callers_for_a_minute_see_no_error_and_cost_no_memory(tmp_path: Path) -> None:
    for here in followed(tmp_path):
        for leader in leader_of(here):
            leader.update(1)
            with served(app_of(leader, token=TOKEN)) as url:
                asyncio.run(_flood(url, 5.0))  # what is made once is made now
                here.publish(3)
                before = _resident()
                answers = asyncio.run(_flood(url, SECONDS))
                grown = _resident() - before
            assert set(answers) == {("GET", 200), ("POST", 200)}, answers
            assert min(answers.values()) > CALLERS
            assert grown < GROWTH, f"{grown:,} bytes more"
            assert here.holds(3)


def _resident() -> int:
    """Bytes of memory of this process: server, callers and all."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def _flood(url: str, seconds: float) -> Counter[tuple[str, int]]:
    limits = httpx.Limits(max_connections=CALLERS)
    headers = {"authorization": f"Bearer {TOKEN}"}
    answers: Counter[tuple[str, int]] = Counter()
    end = time.monotonic() + seconds

    async def call(client: httpx.AsyncClient, number: int) -> None:
        while time.monotonic() < end:
            if number % 2:
                answer = await client.get("/v1/deltachain/status")
            else:
                answer = await client.post("/v1/deltachain/update", json={})
            answers[answer.request.method, answer.status_code] += 1

    async with httpx.AsyncClient(
        base_url=url, limits=limits, headers=headers, timeout=120, trust_env=False
    ) as client:
        await asyncio.gather(*(call(client, number) for number in range(CALLERS)))
    return answers


@pytest.fixture
def replica(leader: Leader) -> Iterator[ReplicaClient]:
    """The client of a replica that asks for no token."""
    with served(app_of(leader, is_open=True)) as url, ReplicaClient(url) as client:
        yield client


@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_verb(here: Followed, leader: Leader, prefix: str) -> None:
    app = app_of(leader, token=TOKEN, prefix=prefix)
    with served(app) as url, ReplicaClient(url, token=TOKEN) as replica:
        assert not replica.ready().ready
        assert replica.update(1).version == 1
        assert replica.stage(2).staged == 2
        assert replica.status().version == 1
        here.faulty.down = True  # what was staged is swapped without the store
        assert replica.update(2).version == 2
        here.faulty.mend()
        assert here.holds(2)
        assert replica.ready().ready
        assert replica.rollback().version == 1
        assert replica.release().pinned is False
        assert replica.update().version == 2
        assert replica.pause().paused
        assert not replica.ready().ready
        assert replica.resume().ready
        assert replica.scrub().ready
        assert "deltachain_version 2.0" in replica.metrics()


def test_what_was_staged_before_a_rollback_is_not_swapped(
    here: Followed, leader: Leader, replica: ReplicaClient
) -> None:
    leader.update(0)
    leader.update(1)
    replica.stage(2)
    replica.rollback(0)
    with pytest.raises(ControlPlaneError, match="a rollback keeps"):
        replica.update(2)
    assert here.holds(0)
    replica.release()
    assert replica.update(2).version == 2
    assert here.holds(2)


def test_staging_that_finds_foreign_weights_stops_the_engine(
    here: Followed, leader: Leader, replica: ReplicaClient
) -> None:
    leader.update(1)
    for parameter in here.engine.models[0].root.parameters():
        parameter.data.view(-1).view(torch.int16).bitwise_xor_(1)
    with pytest.raises(ControlPlaneError, match="BaseMismatchError"):
        replica.stage(2)
    assert here.engine.is_paused()
    assert not replica.ready().ready
    assert replica.update(2).version == 2
    assert not here.engine.is_paused()
    assert here.holds(2)


@pytest.mark.full
def test_what_was_staged_is_let_go_once_following_went_past_it(leader: Leader) -> None:
    leader.update(0)
    leader.stage(1)
    assert leader.status().staged == 1
    for receipt in leader.follow():
        if receipt.version == 2:
            leader.stop()
    assert leader.status().version == 2
    assert leader.status().staged is None


def test_refusals_say_why_and_what_to_do_and_never_a_token(leader: Leader) -> None:
    with served(app_of(leader, token=TOKEN)) as url:
        with ReplicaClient(url, token="wrong") as stranger:  # noqa: S106
            with pytest.raises(ControlPlaneError, match="401") as caught:
                stranger.update(1)
            assert "DELTACHAIN_TOKEN" in caught.value.hint
        with ReplicaClient(url, token=f" {TOKEN}\n") as replica:  # as files have them
            with pytest.raises(ControlPlaneError, match="ChainError") as caught:
                replica.update(99)
            assert TOKEN not in str(caught.value)
        for bad in ("hush\nhush", "hüsch", "hush\x00"):
            with pytest.raises(ConfigError, match="invalid in an HTTP header") as invalid:
                ReplicaClient(url, token=bad)
            assert "hush" not in str(invalid.value)


def test_a_refusal_is_told_by_name(leader: Leader, replica: ReplicaClient) -> None:
    leader.update()
    with pytest.raises(ControlPlaneError) as caught:
        replica.update(99)
    assert caught.value.refusal == "ChainError"
    status = replica.status()
    assert (status.trouble, status.ready) == ("", True)  # what was asked for was at fault
    assert status.manifest == leader.status().manifest
    with pytest.raises(ControlPlaneError) as caught:
        replica.update(1, manifest="not a digest")
    assert caught.value.refusal == ""


@pytest.mark.parametrize("url", ["", "a:8000", "ftp://a", "http://", "http://[::1"])
def test_what_is_no_address_is_said_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match="is not a server address"):
        ReplicaClient(url)


# Servers of another kind


STATUS = f"{PREFIX}/status"


@contextmanager
def answering(answer: Callable[[], Any], **settings: Any) -> Iterator[ReplicaClient]:
    """The client of a server that has nothing but a status."""
    app = FastAPI()
    app.add_api_route(STATUS, answer)
    with served(app) as url, ReplicaClient(url, **settings) as replica:
        yield replica


def test_a_server_without_our_routes_is_named() -> None:
    with (
        served(FastAPI()) as url,
        ReplicaClient(url) as replica,
        pytest.raises(ControlPlaneError, match="no routes of deltachain"),
    ):
        replica.status()


def test_a_newer_server_may_say_more(leader: Leader) -> None:
    status = leader.status()
    said = msgspec.to_builtins(status) | {"added_later": {"a": 1}}
    with answering(lambda: said) as replica:
        assert replica.status() == status


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'{"version": "7"}',
        b"x" * (5 << 20),
        b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    ],
)
def test_an_answer_of_something_else_is_not_believed(content: bytes) -> None:
    with (
        answering(lambda: Response(content)) as replica,
        pytest.raises(ControlPlaneError, match=r"unexpected response body|response above"),
    ):
        replica.status()


def test_an_answer_is_not_unpacked() -> None:
    packed = gzip.compress(bytes(64 << 20))
    headers = {"content-encoding": "gzip"}
    with answering(lambda: Response(packed, headers=headers)) as replica:
        tracemalloc.start()
        with pytest.raises(ControlPlaneError, match="unexpected response body"):
            replica.status()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 16 << 20


def test_an_answer_that_never_ends_is_given_up() -> None:
    """Each byte comes in time, so that no timeout of a single read would end it."""
    ended = Event()

    async def drops() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b" "
                await asyncio.sleep(0.01)
        finally:
            ended.set()

    with answering(lambda: StreamingResponse(drops()), timeout_s=1.5) as replica:
        with pytest.raises(ControlPlaneError, match=r"did not end its answer in 1\.5 s"):
            replica.status()
        assert ended.wait(60)  # the connection is closed, too


# A token is replaced on a running fleet of three, and no call fails


@dataclass(frozen=True)
class Running:
    """Three replicas, each with a file of tokens of its own, and the file of their clients."""

    urls: tuple[str, ...]
    files: tuple[Path, ...]
    mine: Path


@pytest.fixture
def running(leader: Leader, tmp_path: Path) -> Iterator[Running]:
    leader.update(1)
    files = tuple(tmp_path / f"token-{number}" for number in range(3))
    mine = tmp_path / "mine"
    for file in (*files, mine):
        file.write_text("old\n")
    with ExitStack() as stack:
        urls = [stack.enter_context(served(app_of(leader, token=file))) for file in files]
        yield Running(tuple(urls), files, mine)


def put(file: Path, content: str) -> None:
    """Replace a file as a whole: nobody reads half of it, or nothing."""
    written = file.with_name(f"{file.name}.new")
    written.write_text(content)
    written.replace(file)


def test_a_fleet_announces_across_a_rotation(running: Running) -> None:
    with Fleet(running.urls, token=running.mine) as fleet:
        assert fleet.announce(1, deadline=30).enough
        for file in (running.mine, *running.files):
            put(file, "new\nold\n")
            assert fleet.announce(1, deadline=30).enough
        for file in (*running.files, running.mine):
            put(file, "new\n")
        assert fleet.announce(2, deadline=30).enough


def test_a_refused_request_was_not_acted_on_before_the_next_token(
    here: Followed, running: Running
) -> None:
    put(running.mine, "unknown\nold\n")
    events = list(here.engine.events)
    with ReplicaClient(running.urls[0], token=running.mine) as client:
        assert client.pause().paused
        assert here.engine.events[len(events) :].count("pause") == 1
        assert not client.resume().paused
