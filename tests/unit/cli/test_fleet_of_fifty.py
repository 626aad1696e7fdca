"""Fifty replicas, of which five hang, five are cut off from their store, and one lies."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import msgspec
import pytest
from fastapi import FastAPI, Response

from deltachain.replica.leader import Leader
from deltachain.replica.settings import ReplicaSettings
from deltachain.subscribe import SubscribeConfig
from tests.support.engine import FakeEngine, Sharding
from tests.support.faults import FaultyStore
from tests.unit.control.replicas import app_of, served
from tests.unit.replica.replicas import Followed, eventually

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
        """Run the command as somebody would."""
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


@pytest.mark.parametrize("width", [20, 40, 59, 60, 200])
def test_no_number_is_hidden_however_narrow_the_terminal(fleet: FleetOfFifty, width: int) -> None:
    text = "".join(fleet.status("--max-silence", SILENCE_S, width=width).stdout.split())
    expected = "cutoffversion0lag1" if width < 60 else "cutoff01"
    assert text.count(expected) == 5
    for url in (*fleet.healthy, *fleet.cut_off, *fleet.hanging, fleet.liar):
        assert url in text


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
