import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from fastapi.testclient import TestClient

from deltachain.chain.chain import Chain
from deltachain.control.replica_client import ReplicaClient
from deltachain.control.roster import Roster
from deltachain.errors import ConfigError, ControlPlaneError
from deltachain.presence.record import PresenceBoard, PresenceRecord, encode_record
from spaces.dashboard.app import FILES, PAGES, create_app, limited
from spaces.dashboard.chain_index import ChainIndex
from spaces.dashboard.documents import thinned
from spaces.dashboard.watcher import MOMENTS, FleetTrack, Moment, Watcher, changes, spread
from tests.support.faults import FaultyStore
from tests.support.values import eventually
from tests.unit.spaces.dashboard.reports import chain_of, status


async def app(scope: object, receive: object, send: object) -> None:
    del scope, receive
    assert callable(send)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


@contextmanager
def served(request_s: float = 60, most: int = 100) -> Iterator[int]:
    """Serve an app with these limits; yield its port."""
    listening = socket.create_server(("127.0.0.1", 0))
    http = limited(request_s=request_s, most=most)
    config = uvicorn.Config(app, http=http, log_level="critical", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def test_a_client_that_sends_a_byte_at_a_time_is_closed() -> None:
    with served(request_s=0.3) as port:
        begun = time.monotonic()
        with socket.create_connection(("127.0.0.1", port)) as slow, suppress(ConnectionError):
            slow.settimeout(0.05)
            slow.sendall(b"GET / HTTP/1.1\r\nX: ")
            while time.monotonic() < begun + 60:
                slow.sendall(b"y")
                with suppress(TimeoutError):
                    if not slow.recv(1):
                        break
        assert time.monotonic() < begun + 60
        assert httpx.get(f"http://127.0.0.1:{port}").text == "ok"


@pytest.mark.full
def test_a_connection_with_many_requests_stays_open() -> None:
    with served(request_s=2.0) as port, httpx.Client() as client:
        begun = time.monotonic()
        while time.monotonic() < begun + 4.5:
            assert client.get(f"http://127.0.0.1:{port}").text == "ok"


def test_the_oldest_connection_gives_its_place() -> None:
    with served(most=4) as port, ExitStack() as stack:
        address = ("127.0.0.1", port)
        held = [stack.enter_context(socket.create_connection(address)) for _ in range(8)]
        assert httpx.get(f"http://127.0.0.1:{port}").text == "ok"
        for one in held[:5]:
            one.settimeout(60)
            with suppress(ConnectionError):
                assert one.recv(1) == b""


def test_long_columns_keep_their_ends_and_every_peak_and_short_ones_everything() -> None:
    assert thinned([np.arange(5.0)], 5) == [0, 1, 2, 3, 4]
    assert thinned([np.array([])], 5) == []
    generator = np.random.default_rng(0)
    one, other = generator.random(10_000), generator.random(10_000)
    one[4321], other[77], other[9_000] = 50.0, 60.0, -1.0
    chosen = thinned([one, other], 500)
    assert len(chosen) <= 500
    assert chosen == sorted(set(chosen))
    assert {0, 9_999, 4321, 77, 9_000} <= set(chosen)
    ranges = np.array(chosen) // 100
    assert set(ranges.tolist()) == set(range(100))  # nothing is left out for long


def test_values_are_spread_to_the_last() -> None:
    assert spread([1, 2, 3], 3) == [1, 2, 3]
    some = spread(list(range(1000)), 10)
    assert len(some) == 10
    assert some[-1] == 999
    assert set(np.diff(some)) == {100}


def test_a_track_covers_the_whole_time_in_bounded_memory() -> None:
    track = FleetTrack()
    for number in range(10 * MOMENTS):
        track.add(Moment(float(number), number, {"a": number}))
    moments = track.moments(MOMENTS)
    times = [moment.time for moment in moments]
    assert MOMENTS // 2 <= len(times) <= MOMENTS
    assert times[0] < MOMENTS
    assert times[-1] >= 10 * MOMENTS - 16
    assert len(set(np.diff(times))) == 1


def test_only_changes_of_a_replica_are_sent() -> None:
    held = [None, 1, 1, 1, 2, None]
    moments = [Moment(float(time), 2, {"a": version}) for time, version in enumerate(held)]
    assert changes(moments, "a") == [(0, None), (1, 1), (4, 2), (5, None)]
    assert changes(moments, "unknown") == [(0, None)]


TOKEN = "one that nobody guesses"  # noqa: S105
HERE = "http://127.0.0.1:9096"
PATHS = ["overview", "chain", "chart", "versions", "versions/0", "track"]


@pytest.fixture
def chain() -> Chain:
    return chain_of(30)


def watching(chain: Chain, **sources: Any) -> Watcher:
    """A watcher that looks without a pause."""
    return Watcher(ChainIndex(chain.store), poll_s=0.01, asked_s=0.01, **sources)


@pytest.fixture
def watcher(chain: Chain) -> Iterator[Watcher]:
    clients = [ReplicaClient("http://127.0.0.1:1", timeout_s=1)]
    with watching(chain, clients=clients) as made:
        eventually(lambda: made.view.edges and made.track.moments(9))
        yield made


def browser(watcher: Watcher, *, token: str = "", host: str = HERE) -> TestClient:
    return TestClient(create_app(watcher, token=token), base_url=host)


@pytest.mark.parametrize("path", PATHS)
def test_data_needs_the_token(watcher: Watcher, path: str) -> None:
    page = browser(watcher, token=TOKEN, host="http://dashboard.example")
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {TOKEN}"}):
        assert page.get(f"/api/{path}", headers=headers).status_code == 401
    right = page.get(f"/api/{path}", headers={"authorization": f"Bearer {TOKEN}"})
    assert right.status_code == 200


def test_a_token_file_is_read_again(watcher: Watcher, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("old one\n", encoding="ascii")
    page = TestClient(create_app(watcher, token=file), base_url=HERE)

    def status(token: str) -> int:
        return page.get("/api/overview", headers={"authorization": f"Bearer {token}"}).status_code

    assert (status("old one"), status("new one")) == (200, 401)
    file.write_text("new one, longer\n", encoding="ascii")
    assert (status("old one"), status("new one, longer")) == (401, 200)


@pytest.mark.parametrize(
    ("host", "headers", "code"),
    [
        ("http://rebound.example", {}, 403),
        (HERE, {"origin": "https://evil.example"}, 403),
        (HERE, {"origin": "null"}, 403),
        (HERE, {"sec-fetch-site": "cross-site"}, 403),
        (HERE, {"sec-fetch-site": "same-site"}, 403),
        (HERE, {"origin": HERE, "sec-fetch-site": "same-origin"}, 200),
    ],
)
def test_without_a_token_its_own_page_on_this_machine_reads_and_no_other(
    watcher: Watcher, host: str, headers: dict[str, str], code: int
) -> None:
    page = browser(watcher, host=host)
    assert page.get("/api/overview", headers=headers).status_code == code


@pytest.mark.parametrize("path", ["/", "/main.js", "/api/overview", "/api/versions/99", "/no/such"])
def test_every_answer_forbids_code_and_frames_from_elsewhere(watcher: Watcher, path: str) -> None:
    headers = browser(watcher).get(path).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in policy
    assert "require-trusted-types-for 'script'" in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"


def test_nothing_can_be_changed(watcher: Watcher) -> None:
    page = browser(watcher)
    for path in ["/", *(f"/api/{path}" for path in PATHS)]:
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            assert page.request(method, path).status_code == 405


def test_files_of_the_page_are_served_and_no_others(watcher: Watcher) -> None:
    page = browser(watcher)
    for path in FILES:
        assert page.get(f"/{path}").status_code == 200
    for path in ("../app.py", "%2e%2e/app.py", "vendor/uplot/LICENSE", "app.py", "docs"):
        assert page.get(f"/{path}").status_code == 404
    there = {path.relative_to(PAGES).as_posix() for path in PAGES.rglob("*") if path.is_file()}
    assert there - {"vendor/uplot/LICENSE"} == set(FILES.values())


def test_every_script_of_the_page_is_loaded_at_once() -> None:
    page = (PAGES / "index.html").read_text(encoding="utf-8")
    loaded = set(re.findall(r'(?:modulepreload" href|module" src)="(\w[\w.]*)"', page))
    assert loaded == {path for path in FILES if path.endswith(".js")}


def test_scripts_write_text_only() -> None:
    for script in PAGES.glob("*.js"):
        text = script.read_text()
        for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert sink not in text


def test_documents_show_the_chain(watcher: Watcher) -> None:
    page = browser(watcher)
    overview = page.get("/api/overview").json()
    assert overview["newest"] == overview["chain"]["head"]["version"] == 29
    assert [alert["kind"] for alert in overview["alerts"]] == ["silent"]
    assert overview["replicas"][0]["lag"] is None
    total = page.get("/api/chain").json()
    assert total["edges"] == {"anchor": 1, "delta": 29}
    assert total["encodings"] == {"step": 29, "dense": 1}
    chart = page.get("/api/chart?first=10&last=12").json()
    assert chart["versions"] == [10, 11, 12]
    assert len(chart["density"]) == len(chart["nbytes"]) == 3
    table = page.get("/api/versions?before=5&count=3").json()
    assert [row["version"] for row in table["versions"]] == [4, 3, 2]
    assert [(row["pruned"], row["tags"]) for row in table["versions"]] == [(False, [])] * 3
    one = page.get("/api/versions/7").json()
    assert (one["version"], one["edges"][0]["base"]) == (7, 6)
    assert page.get("/api/versions/30").status_code == 404
    track = page.get("/api/track").json()
    assert track["held"] == {"http://127.0.0.1:1": [[0, None]]}


@pytest.mark.parametrize(
    "query",
    ["chart?first=-1", "chart?last=x", "versions?count=0", "versions?count=51", "versions/-1"],
)
def test_bad_questions_are_refused(watcher: Watcher, query: str) -> None:
    assert browser(watcher).get(f"/api/{query}").status_code == 422


def test_a_range_that_is_not_there_is_empty(watcher: Watcher) -> None:
    page = browser(watcher)
    assert page.get("/api/chart?first=500&last=600").json()["versions"] == []
    assert page.get("/api/chart?first=9&last=3").json()["versions"] == []
    assert page.get("/api/versions?before=0").json()["versions"] == []


def test_an_engine_is_named_once(chain: Chain) -> None:
    clients = [ReplicaClient(HERE), ReplicaClient(f"{HERE}/")]
    with pytest.raises(ConfigError, match="twice"):
        Watcher(ChainIndex(chain.store), clients, poll_s=1.0)


def test_replicas_of_a_board_are_shown_beside_those_that_are_asked(
    chain: Chain, tmp_path: Path
) -> None:
    def put(name: str, version: int, seconds_ago: float, **fields: object) -> None:
        data = encode_record(PresenceRecord(time=0.0, status=status(chain, version, **fields)))
        file = tmp_path / f"{name}.json"
        file.write_bytes(data)
        at = time.time() - seconds_ago
        os.utime(file, (at, at))

    put("here", 29, 0)
    put("dead", 20, 3600)
    put("stranger", 29, 0, chain="another")
    put("html", 29, 0, ready=False, reason="<script>alert(1)</script>\x1b[2J")
    (tmp_path / "hostile.json").write_bytes(b"[" * 9999)
    board = PresenceBoard(str(tmp_path))
    with watching(chain, boards=[board]) as watcher:
        eventually(lambda: watcher.view.edges and len(watcher.engines) == 5)
        eventually(lambda: any("dead" in name for name in watcher.track.moments(9)[-1].held))
        found = browser(watcher).get("/api/overview").json()
        moment = watcher.track.moments(9)[-1]
    rows = {row["engine"].removeprefix(f"{board.url}/"): row for row in found["replicas"]}
    assert rows.keys() == {"here", "dead", "stranger", "html", "hostile"}
    assert (rows["here"]["version"], rows["here"]["trouble"]) == (29, "")
    assert "no presence record" in rows["hostile"]["trouble"]
    assert "\x1b" not in rows["html"]["reason"]
    kinds = {
        alert["engine"].removeprefix(f"{board.url}/"): alert["kind"] for alert in found["alerts"]
    }
    assert kinds["dead"] in ("silent", "behind")
    assert "silent" in {a["kind"] for a in found["alerts"] if a["engine"].endswith("dead")}
    assert (kinds["stranger"], kinds["html"]) == ("another chain", "not ready")
    assert kinds["hostile"] == "silent"
    assert "here" not in kinds
    assert moment.held[f"{board.url}/dead"] is None


def test_a_board_that_cannot_be_read_is_an_alert(chain: Chain, tmp_path: Path) -> None:
    board = PresenceBoard(str(tmp_path / "nobody"))
    with watching(chain, boards=[board]) as watcher:
        eventually(lambda: watcher.overview().alerts)
        (alert,) = watcher.overview().alerts
    assert (alert.engine, alert.kind) == (board.url, "silent")
    assert "no presence of a replica" in alert.message


def test_replicas_of_a_board_stay_while_it_cannot_be_read(chain: Chain, tmp_path: Path) -> None:
    data = encode_record(PresenceRecord(time=0.0, status=status(chain, 29)))
    (tmp_path / "here.json").write_bytes(data)
    board = PresenceBoard(str(tmp_path))
    store = FaultyStore(board._store)
    board._store = store
    with watching(chain, boards=[board]) as watcher:
        eventually(lambda: watcher.engines == (f"{board.url}/here",))
        store.down = True
        eventually(lambda: board.url in watcher.engines)
        here, board_itself = watcher.overview().reports
        assert (here.engine, here.status.version, here.trouble) == (f"{board.url}/here", 29, "")
        assert board_itself.trouble
        store.down = False
        eventually(lambda: watcher.engines == (f"{board.url}/here",))


def test_a_name_is_looked_up_again_and_again(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = ["http://127.0.0.1:1"]

    def resolve(name: str) -> list[str]:
        if not addresses:
            raise ControlPlaneError(f"{name} cannot be resolved", hint="wait")
        return list(addresses)

    monkeypatch.setattr("deltachain.control.roster.resolve", resolve)
    name = "dns://policy.default.svc:8000"
    rosters = [Roster([name])]
    with watching(chain, names=rosters) as watcher:
        eventually(lambda: watcher.engines == ("http://127.0.0.1:1",))
        addresses[:] = ["http://127.0.0.1:2"]
        eventually(lambda: watcher.engines == ("http://127.0.0.1:2",))
        assert rosters[0]._resolved.keys() == {"http://127.0.0.1:2"}
        addresses.clear()
        eventually(lambda: watcher.engines == ("http://127.0.0.1:2", name))
        assert {alert.engine for alert in watcher.overview().alerts} == set(watcher.engines)
