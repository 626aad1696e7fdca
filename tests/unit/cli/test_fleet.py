import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from threading import Semaphore
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI, Response
from rich.console import Console

from deltachain.cli.fleet import replica_table
from deltachain.control.comparison import compare
from deltachain.errors import ControlPlaneError
from deltachain.replica.leader import Leader
from deltachain.replica.settings import ReplicaSettings
from deltachain.status import HealthLimits
from deltachain.subscribe import SubscribeConfig
from tests.support.engine import FakeEngine, Sharding
from tests.support.faults import FaultyStore
from tests.support.values import eventually
from tests.unit.cli.support import invoke
from tests.unit.control.replicas import app_of, followed, leader_of, served
from tests.unit.replica.replicas import Followed

HEALTHY, CUT_OFF, HANGING = 39, 5, 5
LIE = 10**6
SILENCE_S = 2.0


@dataclass
class FleetOfFifty:
    """Addresses, and the names of those that are not well."""

    healthy: list[str] = field(default_factory=list)
    cut_off: list[str] = field(default_factory=list)
    hanging: list[str] = field(default_factory=list)
    liar: str = ""

    def status(
        self, *words: object, width: int = 80, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        urls = [*self.healthy, *self.cut_off, *self.hanging, self.liar]
        return subprocess.run(
            [sys.executable, "-m", "deltachain", "fleet", "status", *map(str, words), *urls],
            env=os.environ | {"COLUMNS": str(width)} | variables,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetOfFifty]:
    folder = tmp_path_factory.mktemp("fifty")
    here, made, app = Followed(Sharding(), folder), FleetOfFifty(), FastAPI()
    with ExitStack() as stack:
        stack.callback(here.close)
        leaders, stores = [], []
        for number in range(HEALTHY + CUT_OFF + 1):
            spool, store = folder / f"spool{number}", FaultyStore(here.store)
            subscribe = SubscribeConfig(
                url=here.store.url, poll_s=0.5
            )  # each is a thread of this process
            settings = ReplicaSettings(subscribe=subscribe, spool=spool, follow=True)
            engine = FakeEngine(here.shape, folder / "model", spool)
            leader = Leader(settings, engine, store=store)
            stack.callback(leader.stop)
            leader.start()
            leaders.append(leader)
            stores.append(store)
            app.mount(f"/r{number}", app_of(leader, is_open=True))
        lying = leaders[-1]

        @app.get("/lies/v1/deltachain/status")
        def lie() -> Response:
            told = msgspec.structs.replace(lying.status(), head=LIE, lag_versions=0)
            return Response(msgspec.json.encode(told), media_type="application/json")

        for store in stores[HEALTHY:-1]:
            store.down = True
        here.publish(1)
        well = [*leaders[:HEALTHY], lying]
        eventually(lambda: all(one.status().version == 1 for one in well))
        cut = leaders[HEALTHY:-1]
        eventually(lambda: all((one.status().silence_s or 0) > SILENCE_S for one in cut))
        url = stack.enter_context(served(app))
        made.healthy = [f"{url}/r{number}" for number in range(HEALTHY)]
        made.cut_off = [f"{url}/r{HEALTHY + number}" for number in range(CUT_OFF)]
        made.liar = f"{url}/lies"
        for _ in range(HANGING):
            hangs = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            made.hanging.append(f"http://127.0.0.1:{hangs.getsockname()[1]}")
        assert {(one.status().ready, one.status().lag_versions) for one in cut} == {(True, 0)}
        yield made


@pytest.mark.full
def test_all_are_shown_and_the_eleven_come_first(fleet: FleetOfFifty) -> None:
    shown = fleet.status("--max-silence", SILENCE_S)
    lines = shown.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    named = [words[-1] for line in lines if (words := line.split()) and "://" in words[-1]]
    assert len(named) == 50
    assert set(named[:5]) == set(fleet.hanging)
    assert named[5] == fleet.liar
    assert set(named[6:11]) == set(fleet.cut_off)
    assert set(named[11:]) == set(fleet.healthy)
    rows = [line.split("http")[0].split() for line in lines if "://" in line]
    assert (rows[:5], rows[5]) == ([["failed", "-", "-"]] * 5, ["in", "doubt", "1", "0"])
    assert (rows[6:11], rows[11:]) == ([["cut", "off", "0", "1"]] * 5, [["ready", "1", "0"]] * 39)
    assert "39 ready" in lines[-1]
    assert shown.returncode == 7


@pytest.mark.full
@pytest.mark.parametrize("width", [20, 40, 59, 60, 200])
def test_no_number_is_hidden_however_narrow_the_terminal(fleet: FleetOfFifty, width: int) -> None:
    text = "".join(fleet.status("--max-silence", SILENCE_S, width=width).stdout.split())
    expected = "cutoffversion0lag1" if width < 60 else "cutoff01"
    assert text.count(expected) == 5
    for url in (*fleet.healthy, *fleet.cut_off, *fleet.hanging, fleet.liar):
        assert url in text


@pytest.mark.full
def test_json_has_all_of_them_in_the_order_given(fleet: FleetOfFifty) -> None:
    shown = fleet.status("--json", DELTACHAIN_MAX_SILENCE_S=str(SILENCE_S))
    found = json.loads(shown.stdout)["replicas"]
    assert [row["engine"] for row in found] == [
        *fleet.healthy,
        *fleet.cut_off,
        *fleet.hanging,
        fleet.liar,
    ]
    assert [row["health"] for row in found] == [
        *["ready"] * HEALTHY,
        *["cut off"] * CUT_OFF,
        *["failed"] * HANGING,
        "in doubt",
    ]
    assert {row["software"] for row in found[:HEALTHY]} == {"fake/1.0"}


COUNT = 50
ROWS = compare(
    {f"http://r{n}:8000": ControlPlaneError("did not answer") for n in range(COUNT)}, HealthLimits()
)


def drawn(width: int, height: int | None) -> list[str]:
    out = Console(file=io.StringIO(), width=width, height=height or 25)
    with out.capture() as told:
        out.print(replica_table(ROWS, 0, width, height))
    return [line.rstrip() for line in told.get().splitlines()]


@pytest.mark.parametrize("width", [30, 80, 200])
@pytest.mark.parametrize("height", [10, 24])
def test_the_summary_is_shown_however_low_the_terminal(width: int, height: int) -> None:
    lines = drawn(width, height)
    assert len(lines) <= height
    whole = drawn(width, None)
    assert lines[:4] == whole[:4]
    assert "50 failed" in " ".join(line.strip() for line in lines[-3:])
    assert any(line == "..." for line in lines)


@pytest.mark.parametrize("height", [None, 300])
def test_all_are_drawn_where_there_is_room(height: int | None) -> None:
    lines = drawn(80, height)
    assert sum("http://" in line for line in lines) == COUNT
    assert not any(line == "..." for line in lines)


TOKEN = "one that nobody guesses"  # noqa: S105
GONE = "http://127.0.0.1:9"


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[Leader]:
    for here in followed(tmp_path):
        yield from leader_of(here)


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    return file


def test_status_of_all_and_who_is_gone(leader: Leader, token: Path) -> None:
    with served(app_of(leader, token=TOKEN)) as url:
        told = invoke("fleet", "update", "--version", 1, "--token-file", token, url)
        assert told.code == 0
        found = invoke("fleet", "status", "--token-file", token, "--json", url, GONE)
    first, second = found.document["replicas"]
    assert (first["engine"], first["version"], first["ready"]) == (url, 1, False)
    assert "did not answer" in second["error"]
    assert "see whether it runs" in second["hint"]
    assert found.code == 7


@pytest.mark.parametrize("words", [("fleet", "status", GONE), ("agent", "x", "--engine", GONE)])
@pytest.mark.parametrize("option", ["--token", "--key", "--tok", "--token-fi"])
def test_no_secret_is_an_option(words: tuple[str, ...], option: str) -> None:
    """Whoever may list processes sees what they were started with."""
    refused = invoke(*words, option, "secret")
    assert refused.code == 2
    assert "No such option" in refused.stderr


@pytest.mark.parametrize("content", [None, b"", b"\n", b"one\x01\n", b"\xff\xfe"])
def test_a_file_without_a_token_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    refused = invoke("fleet", "status", "--token-file", file, GONE)
    assert refused.code == 2
    assert str(file) in refused.stderr
    assert "one token" in refused.stderr


def test_the_environment_says_it_too_and_is_checked(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTACHAIN_TOKEN", TOKEN)
    with served(app_of(leader, token=TOKEN)) as url:
        assert invoke("fleet", "status", url).code == 0
    monkeypatch.setenv("DELTACHAIN_TOKNE", TOKEN)
    refused = invoke("fleet", "status", GONE)
    assert refused.code == 2
    assert "DELTACHAIN_TOKEN" in refused.stderr


def test_the_table(leader: Leader, token: Path) -> None:
    leader.update()
    with served(app_of(leader, token=TOKEN)) as url:
        shown = invoke("fleet", "status", "--token-file", token, url)
        refused = invoke("fleet", "pause", url)
    assert "ready" in shown.stdout
    assert url in shown.stdout
    assert shown.stdout.endswith("newest version held: 2\n")
    assert "401" in refused.stdout
    assert refused.code == 7
    assert leader.status().paused is False


def test_only_some_verbs_take_a_version() -> None:
    assert invoke("fleet", "pause", "--version", 1, GONE).code == 2


def test_an_inventory_names_the_replicas(leader: Leader, tmp_path: Path) -> None:
    leader.update()
    file = tmp_path / "replicas.txt"
    with served(app_of(leader, is_open=True)) as url:
        file.write_text(f"# all of them\n{url}/  # the first\n{GONE}\n")
        found = invoke("fleet", "status", "--inventory", file, "--json")
    rows = found.document["replicas"]
    assert [(row["engine"], row["health"]) for row in rows] == [(url, "ready"), (GONE, "failed")]
    assert (rows[0]["lag_versions"], rows[0]["software"]) == (0, "fake/1.0")
    assert found.code == 7


def test_the_environment_names_the_replicas(
    leader: Leader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(app_of(leader, is_open=True)) as url:
        monkeypatch.setenv("DELTACHAIN_ENGINES", f"{url}, {url}/")
        assert len(invoke("fleet", "status", "--json").document["replicas"]) == 1
        file = tmp_path / "replicas.txt"
        file.write_text(f"{GONE}\n")
        monkeypatch.setenv("DELTACHAIN_ENGINES", str(file))
        found = invoke("fleet", "status", "--json").document["replicas"]
        assert [row["engine"] for row in found] == [GONE]
        assert invoke("fleet", "status", url).code == 0  # what is given counts


def test_a_name_that_cannot_be_resolved_is_a_row(leader: Leader) -> None:
    with served(app_of(leader, is_open=True)) as url:
        name = "dns://no.such.name.invalid:8000"
        found = invoke("fleet", "status", "--json", url, name)
    rows = {row["engine"]: row["health"] for row in found.document["replicas"]}
    assert rows == {url: "not ready", name: "failed"}
    assert found.code == 7


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("status",), "no replica is given"),
        (("status", "--inventory", "x", GONE), "exclude each other"),
        (("update", "--watch", GONE), "watch `status`"),
        (("status", "dns://policy"), "no port"),
        (("status", "policy:8000"), "not a server address"),
    ],
)
def test_wrong_calls_say_what_to_do(words: tuple[str, ...], said: str) -> None:
    refused = invoke("fleet", *words)
    assert refused.code == 2
    assert said in refused.stderr


@pytest.mark.full
@pytest.mark.parametrize("options", [["--json"], []])
def test_watching_goes_on_until_it_is_interrupted(leader: Leader, options: list[str]) -> None:
    leader.update()
    app, asked = app_of(leader, is_open=True), Semaphore(0)

    async def counting(scope: Any, receive: Any, send: Any) -> None:
        await app(scope, receive, send)
        if scope["type"] == "http":
            asked.release()

    with served(counting) as url:
        words = ["fleet", "status", "--watch", "--every", "0.1", *options, url]
        process = subprocess.Popen(
            [sys.executable, "-m", "deltachain", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3):  # two rounds are complete once there is a third
            assert asked.acquire(timeout=60)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    if options:
        rounds = [json.loads(line) for line in stdout.splitlines()]
        assert len(rounds) >= 2
        assert {one["replicas"][0]["health"] for one in rounds} == {"ready"}
    else:
        assert "1 replica: 1 ready" in stdout
