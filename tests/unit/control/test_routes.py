import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any
from unittest import mock

import httpx
import pytest
import schemathesis
from fastapi import FastAPI, HTTPException
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from prometheus_client import REGISTRY, generate_latest
from schemathesis import GenerationMode

from deltachain.control import server as auth
from deltachain.control.roster import parse_inventory, read_inventory, resolve, split_entries
from deltachain.control.routes import router
from deltachain.control.server import AT_ONCE, Control, RequestKind, join_registry, lead
from deltachain.errors import ChainError, ConfigError, ControlPlaneError
from deltachain.metrics import register_figures
from deltachain.replica.leader import Leader
from tests.unit.control.replicas import app_of, followed, leader_of, served
from tests.unit.replica.replicas import Followed

TOKEN = "one that nobody guesses"  # noqa: S105
DOCUMENTED = [route for route in router.routes if isinstance(route, APIRoute)]
PATHS = [route.path for route in DOCUMENTED]
PROBES = ("/healthz", "/readyz")
VERSIONED = ("/stage", "/update", "/rollback")
"""Routes that take a version: what else can be sent to them is known to their documents."""

ASKS = [(path, GenerationMode.POSITIVE) for path in PATHS]
ASKS += [(path, GenerationMode.NEGATIVE) for path in VERSIONED]


@pytest.mark.full
@pytest.mark.parametrize(("path", "mode"), ASKS)
def test_every_answer_is_one_that_the_documents_name(
    tmp_path: Path, path: str, mode: GenerationMode
) -> None:
    for here in followed(tmp_path):
        for leader in leader_of(here):
            leader.update()
            _try(app_of(leader, token=TOKEN), path, mode)


def _try(app: Any, path: str, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    (found,) = schema.include(path=f"/v1/deltachain{path}").get_all_operations()
    operation: Any = found
    asked: list[int] = []

    @given(case=operation.ok().as_strategy(generation_mode=mode))
    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    def ask(case: Any) -> None:
        answer = case.call_and_validate(headers={"Authorization": f"Bearer {TOKEN}"})
        asked.append(answer.status_code)

    ask()
    assert asked
    if mode is GenerationMode.NEGATIVE:
        assert len(asked) > 5
        assert 422 in asked


def test_the_documents_say_that_a_token_is_asked_for() -> None:
    document = schemathesis.openapi.from_asgi("/openapi.json", app_of(None)).raw_schema
    assert document["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    for path, operations in document["paths"].items():
        for operation in operations.values():
            open_to_all = path.rpartition("/v1/deltachain")[2].removesuffix("/deltachain") in PROBES
            assert operation.get("security") == (None if open_to_all else [{"token": []}])


def test_a_body_that_does_not_end_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "BODY_S", 0.3)
    stop = Event()

    async def trickle(url: str) -> int:
        async def body() -> AsyncIterator[bytes]:
            while not stop.is_set():
                yield b" "
                await asyncio.sleep(0.05)

        async with httpx.AsyncClient(timeout=60) as asking:
            headers = {"Authorization": "Bearer t"}
            try:
                sent = asking.post(f"{url}/v1/deltachain/update", content=body(), headers=headers)
                return (await sent).status_code
            except httpx.TransportError:  # closed while it was sent
                return 408
            finally:
                stop.set()

    for here in followed(tmp_path):
        for leader in leader_of(here):
            with served(app_of(leader, token="t")) as url:  # noqa: S106
                assert asyncio.run(asyncio.wait_for(trickle(url), 60)) == 408
            assert here.holds(0)


def test_an_inventory_is_a_file_of_lines_or_a_list_with_commas(tmp_path: Path) -> None:
    file = tmp_path / "replicas.txt"
    lines = ("http://a:8000", "http://b:8000/", "dns://policy.default.svc:8000")
    file.write_text("# eu\n{}\n\n  {}  # the old one\n{}\n".format(*lines))
    assert read_inventory(file) == parse_inventory(str(file)) == lines
    assert parse_inventory(" http://a:8000, http://b:8000/,,") == lines[:2]


@pytest.mark.parametrize(
    "content", [b"", b"# nothing\n\n", b"a:8000\n", b"http://a http://b\n", b"\xff\xfe", None]
)
def test_a_file_without_addresses_is_refused_by_name(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "replicas.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"replicas\.txt") as caught:
        read_inventory(file)
    assert "one address a line" in caught.value.hint


def test_entries_are_taken_once_and_in_order() -> None:
    found = split_entries(["http://b", "dns://x:1", "http://a/", "http://b/"])
    assert found == (["http://b", "http://a"], ["dns://x:1"])


def test_a_name_stands_for_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(name: str, port: int, **_: Any) -> list[Any]:
        assert (name, port) == ("policy", 8000)
        return [(0, 0, 0, "", (host, port)) for host in ("10.0.0.2", "10.0.0.1", "10.0.0.2", "::1")]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    found = resolve("dns://policy:8000")
    assert found == ["http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://[::1]:8000"]


@pytest.mark.parametrize("entry", ["dns://policy", "dns://:8000", "dns://policy:http"])
def test_a_name_needs_a_port(entry: str) -> None:
    with pytest.raises(ConfigError, match="no port"):
        resolve(entry)


@pytest.mark.parametrize("name", ["no.such.name.invalid", f"{'x' * 70}.invalid"])
def test_a_name_without_addresses_is_an_error(name: str) -> None:
    with pytest.raises(ControlPlaneError, match=f"dns://{name[:20]}.* cannot be resolved"):
        resolve(f"dns://{name}:8000")


PREFIX = "/v1/deltachain"
HERE = "http://127.0.0.1:8000"
GETS = ("status", "ready", "metrics")
POSTS = ("stage", "update", "rollback", "release", "pause", "resume", "scrub")
ROUTES = [*(("GET", one) for one in GETS), *(("POST", one) for one in POSTS)]


def client(leader: Leader | None, *, token: str = "", is_open: bool = False) -> TestClient:
    return TestClient(app_of(leader, token=token, is_open=is_open), base_url=HERE)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.mark.parametrize(("method", "route"), ROUTES)
@pytest.mark.parametrize("headers", [{}, bearer("wrong"), bearer(""), {"X-DeltaChain-Token": "x"}])
def test_nobody_is_let_in_without_the_token(
    here: Followed, leader: Leader, method: str, route: str, headers: dict[str, str]
) -> None:
    with client(leader, token=TOKEN, is_open=True) as server:
        answer = server.request(method, f"/v1/deltachain/{route}", headers=headers)
    assert answer.status_code == 401
    assert TOKEN not in answer.text
    assert here.engine.events == []


@pytest.mark.parametrize(("method", "route"), ROUTES)
def test_without_token_key_or_loopback_the_routes_are_shut(
    leader: Leader, method: str, route: str
) -> None:
    with client(leader) as server:
        answer = server.request(method, f"/v1/deltachain/{route}")
    assert answer.status_code == 403
    assert "DELTACHAIN_TOKEN" in answer.text


@pytest.mark.parametrize(("token", "code"), [("", 401), ("key", 503), (TOKEN, 401)])
def test_without_a_token_the_servers_key_opens_them(token: str, code: int) -> None:
    """503: let in, and told that this server follows nothing."""
    app = FastAPI()
    app.include_router(router, prefix=PREFIX)
    app.state.deltachain = asyncio.run(
        lead(mock.Mock(), {}, is_open=True, is_guarded=True, key="key")
    )
    with TestClient(app, base_url=HERE) as server:
        assert server.get(f"{PREFIX}/status", headers=bearer(token)).status_code == code


@pytest.mark.parametrize("headers", [bearer(TOKEN), {"X-DeltaChain-Token": TOKEN, **bearer("key")}])
def test_a_token_opens_them_and_bodies_may_be_left_out(
    here: Followed, leader: Leader, headers: dict[str, str]
) -> None:
    with client(leader, token=TOKEN) as server:
        ready = server.get(f"{PREFIX}/ready", headers=headers)
        assert (ready.status_code, ready.json()["ready"]) == (503, False)
        for _ in range(2):  # once more changes nothing
            answer = server.post(f"{PREFIX}/update", json={"version": 1}, headers=headers)
            assert (answer.status_code, answer.json()["version"]) == (200, 1)
        assert server.post(f"{PREFIX}/update", headers=headers).json()["version"] == 2
        assert server.get(f"{PREFIX}/ready", headers=headers).status_code == 200
        back = server.post(f"{PREFIX}/rollback", json={}, headers=headers).json()
        assert (back["version"], back["pinned"]) == (1, True)
        status = server.post(f"{PREFIX}/release", headers=headers).json()
        assert (status["version"], status["pinned"], status["head"]) == (1, False, 2)
    assert here.holds(1)


BAD_REQUESTS = [
    *(
        (method, route, *asked)
        for method, route in ROUTES
        for asked in [
            ("", b" " * 5000, 413),
            ("", b"x" * (1 << 20), 413),
            ("", b'{"url": "s3://elsewhere"}', 422),
            ("?url=s3://elsewhere", b"", 422),
        ]
    ),
    ("POST", "update", "", b'{"version": -1}', 422),
    ("POST", "update", "", b'{"version": "1"}', 422),
    ("POST", "update", "", b'{"version": 1.5}', 422),
    ("POST", "update", "", b'{"version": 1, "url": "s3://elsewhere"}', 422),
    ("POST", "update", "", b"[1]", 422),
    ("POST", "update", "", b"not json", 422),
    ("POST", "update", "", b'{"version": 99}', 409),
]


@pytest.mark.parametrize(("method", "route", "query", "body", "code"), BAD_REQUESTS)
def test_no_route_takes_an_address_much_of_a_body_or_another_version(
    here: Followed,
    leader: Leader,
    caplog: pytest.LogCaptureFixture,
    *,
    method: str,
    route: str,
    query: str,
    body: bytes,
    code: int,
) -> None:
    leader.update(1)
    events = list(here.engine.events)
    with client(leader, token=TOKEN) as server:
        url = f"{PREFIX}/{route}{query}"
        answer = server.request(method, url, content=body, headers=bearer(TOKEN))
    assert answer.status_code == code
    for text in (answer.text, caplog.text):
        assert "elsewhere" not in text
        assert TOKEN not in text
    assert here.engine.events == events
    assert here.holds(1)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "127.0.0.1:80@evil.com",
        "127.0.0.1#.evil.com",
        "127.0.0.1/.evil.com",
        "127.0.0.1?.evil.com",
        "127.0.0.1\\.evil.com",
        "[::1",
        "::1",
        "[::1]x",
        "127.0.0.1:",
        "127.0.0.1:port",
        "127.0.0.1 evil.com",
        "user@127.0.0.1",
        ".127.0.0.1",
    ],
)
@pytest.mark.parametrize("token", ["", TOKEN])
def test_a_host_that_names_none_is_refused(host: str, token: str) -> None:
    with client(None, is_open=True, token=token) as server:
        for method, route in ROUTES:
            headers = {"Host": host, **bearer(TOKEN)}
            answer = server.request(method, f"{PREFIX}/{route}", headers=headers)
            assert answer.status_code == 400, (route, answer.text)


def test_two_hosts_are_none() -> None:
    with client(None, is_open=True) as server:
        headers = [("Host", "127.0.0.1"), ("Host", "127.0.0.1")]
        assert server.get(f"{PREFIX}/status", headers=headers).status_code == 400


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8000", "[::1]:8000", "LocalHost"])
def test_the_loopback_interface_has_several_names(host: str) -> None:
    with client(None, is_open=True) as server:
        assert server.get(f"{PREFIX}/status", headers={"Host": host}).status_code == 503


@pytest.mark.parametrize(("method", "route"), ROUTES)
@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "same-origin"},
    ],
)
def test_no_page_asks_an_open_server_anything(
    method: str, route: str, headers: dict[str, str]
) -> None:
    """Also not what it only loads, for which a browser sends no ``Origin``."""
    with client(None, is_open=True) as server:
        assert server.request(method, f"{PREFIX}/{route}", headers=headers).status_code == 403


def test_who_types_the_address_of_an_open_server_or_has_a_token_is_answered() -> None:
    """503: let in, and told that this server follows nothing."""
    with client(None, is_open=True) as server:
        for headers in ({}, {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"}):
            assert server.get(f"{PREFIX}/status", headers=headers).status_code == 503
    with client(None, is_open=True, token=TOKEN) as server:
        for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
            answer = server.get(f"{PREFIX}/status", headers=headers | bearer(TOKEN))
            assert answer.status_code == 503


def test_probes_need_no_token_and_say_nothing(leader: Leader) -> None:
    with client(leader, token=TOKEN) as server:
        assert server.get("/v1/deltachain/healthz").text == "ok"
        waiting = server.get("/v1/deltachain/readyz")
        assert (waiting.status_code, waiting.text) == (503, "not ready")
        leader.update()
        ready = server.get("/v1/deltachain/readyz")
        assert (ready.status_code, ready.text) == (200, "ready")
        assert server.get("/healthz/deltachain").text == "ok"
        assert server.get("/readyz/deltachain").text == "ready"


def test_a_replica_that_lags_is_not_ready(here: Followed, leader: Leader) -> None:
    leader.update()
    leader.settings = replace(leader.settings, max_lag=1)
    with client(leader, is_open=True) as server:
        here.publish(3)
        leader.subscriber.chain.newest(2)
        assert server.get("/v1/deltachain/readyz").status_code == 200
        here.publish(4)
        leader.subscriber.chain.newest(3)
        assert server.get("/v1/deltachain/readyz").status_code == 503
        assert "2 versions behind" in server.get("/v1/deltachain/ready").text


def test_metrics_count_what_was_applied(leader: Leader) -> None:
    with client(leader, is_open=True) as server:
        leader.update(1)
        leader.update(2)
        with pytest.raises(ChainError):
            leader.update(99)
        found = server.get("/v1/deltachain/metrics")
    assert found.headers["content-type"].startswith("text/plain; version=0.0.4")
    figures = dict(line.split() for line in found.text.splitlines() if not line.startswith("#"))
    assert float(figures["deltachain_version"]) == 2
    assert float(figures["deltachain_applies_total"]) == 2
    assert float(figures["deltachain_failures_total"]) == 1
    assert float(figures["deltachain_fetched_bytes_total"]) > 0
    assert float(figures["deltachain_pause_seconds_total"]) > 0


def test_an_engines_own_registry_shows_a_leader_too(leader: Leader) -> None:
    leader.update(1)
    join_registry(Control(leader, "", token="", is_open=True))
    try:
        shown = generate_latest(REGISTRY).decode()
    finally:
        register_figures(tuple)
    assert "\ndeltachain_version 1.0\n" in shown
    assert 'engine="fake/1.0"' in shown
    assert "deltachain_" not in generate_latest(REGISTRY).decode()


def test_errors_say_what_to_do(here: Followed, leader: Leader) -> None:
    leader.update(1)
    here.faulty.down = True
    with client(leader, is_open=True) as server:
        answer = server.post("/v1/deltachain/update", json={})
        error = answer.json()["error"]
        assert (answer.status_code, error["retryable"]) == (503, True)
        assert error["hint"]
        status = server.get("/v1/deltachain/status").json()
        assert status["version"] == 1
        assert status["trouble"]


def test_a_replica_in_doubt_is_not_resumed(here: Followed, leader: Leader) -> None:
    leader.update(1)
    here.scribble(0, "layers.0.norm.weight")
    here.faulty.down = True
    with client(leader, is_open=True) as server:
        assert server.post("/v1/deltachain/scrub").status_code == 503
        refused = server.post("/v1/deltachain/resume")
        assert (refused.status_code, refused.json()["error"]["type"]) == (409, "PoisonedError")
        assert server.get("/v1/deltachain/ready").status_code == 503
    assert here.engine.paused


def test_a_server_that_follows_nothing_says_so() -> None:
    with client(None, is_open=True) as server:
        for method, route in ROUTES:
            answer = server.request(method, f"/v1/deltachain/{route}")
            assert answer.status_code == 503
            assert "follows nothing" in answer.text


def caller(*, is_gone: bool) -> mock.Mock:
    return mock.Mock(is_disconnected=mock.AsyncMock(return_value=is_gone))


@pytest.mark.full
def test_updates_that_hang_do_not_keep_anybody_from_pausing(leader: Leader) -> None:
    hangs = Event()
    kinds: tuple[RequestKind, ...] = ("update", "rollback")

    async def ask() -> None:
        control = Control(leader, "", token="", is_open=True)
        gone, waits = caller(is_gone=True), caller(is_gone=False)
        for kind in kinds * AT_ONCE:
            with pytest.raises(HTTPException, match="client disconnected"):
                await control.run(lambda _: hangs.wait(60), gone, kind)
        assert await asyncio.wait_for(control.run(lambda _: "paused", waits), 20) == "paused"

    asyncio.run(ask())
    hangs.set()


def test_whoever_waits_in_the_queue_is_let_go_too_and_keeps_no_place(leader: Leader) -> None:
    hangs = Event()
    gone, stays = caller(is_gone=True), caller(is_gone=False)

    async def ask() -> None:
        control = Control(leader, "", token="", is_open=True)
        asked = [control.run(lambda _: hangs.wait(60), gone, "update") for _ in range(3 * AT_ONCE)]
        found = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 20)
        assert ["client disconnected" in str(one) for one in found] == [True] * len(asked)
        assert all(isinstance(one, HTTPException) for one in found)
        assert len(asyncio.all_tasks()) <= 1 + AT_ONCE  # this one, and those whose work goes on
        hangs.set()
        later = [control.run(lambda _: "done", stays, "update") for _ in range(2 * AT_ONCE)]
        assert await asyncio.wait_for(asyncio.gather(*later), 20) == ["done"] * 2 * AT_ONCE

    asyncio.run(ask())
