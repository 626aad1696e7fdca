import asyncio
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import pytest
from fastapi import FastAPI

from deltachain.control.replica_client import ReplicaClient
from deltachain.control.roster import Roster
from deltachain.control.server import Control, LedEngine, lead, leave_at_end
from deltachain.errors import ConfigError, ControlPlaneError, EngineDamagedError, EngineVersionError
from deltachain.presence.record import parse_record
from deltachain.replica.leader import Leader
from deltachain.replica.settings import ReplicaSettings
from deltachain.status import Status
from tests.support.engine import Sharding
from tests.support.values import eventually, present
from tests.unit.control.replicas import followed, status
from tests.unit.replica.replicas import Followed


@contextmanager
def silent(count: int = 1) -> Iterator[list[str]]:
    """Addresses that accept connections and never answer."""
    with ExitStack() as stack:
        listening = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        yield [f"http://127.0.0.1:{one.getsockname()[1]}" for one in listening]


def test_answers_come_before_those_that_hang() -> None:
    released = Event()

    def ask(client: ReplicaClient) -> Status:
        if client.url.endswith("slow"):
            released.wait()
        return status()

    with Roster(["http://a/slow", "http://b", "http://c"]) as roster:
        answers = roster.ask(ask)
        assert {next(answers)[0], next(answers)[0]} == {"http://b", "http://c"}
        released.set()
        assert next(answers)[0] == "http://a/slow"
        assert list(answers) == []


def test_a_round_ends_though_replicas_never_answer() -> None:
    with silent(3) as urls, Roster(urls, timeout_s=0.2) as roster:
        answers = dict(roster.ask(ReplicaClient.status))
    assert answers.keys() == set(urls)
    assert all("did not answer" in str(one) for one in answers.values())


def test_who_still_hangs_is_not_asked_again() -> None:
    released, asked = Event(), []

    def ask(client: ReplicaClient) -> Status:
        asked.append(client.url)
        released.wait()
        return status()

    with Roster(["http://a"], timeout_s=0.05) as roster:
        assert "did not answer in 0.05 s" in str(dict(roster.ask(ask))["http://a"])
        assert "the round before" in str(dict(roster.ask(ask))["http://a"])
        assert asked == ["http://a"]
        released.set()
        while isinstance(dict(roster.ask(ask))["http://a"], ControlPlaneError):
            pass


def test_an_unforeseen_error_is_an_answer_too() -> None:
    def ask(_: ReplicaClient) -> Status:
        raise RuntimeError("nobody foresaw this")

    with Roster(["http://a"]) as roster:
        answer = dict(roster.ask(ask))["http://a"]
    assert isinstance(answer, ControlPlaneError)
    assert "nobody foresaw this" in str(answer)


def test_a_name_that_fails_is_an_answer_beside_the_others() -> None:
    with Roster(["dns://no.such.name.invalid:8000", "http://a"]) as roster:
        answers = dict(roster.ask(lambda _: status()))
    assert "cannot be resolved" in str(answers["dns://no.such.name.invalid:8000"])
    assert isinstance(answers["http://a"], Status)


# What a server has once its start is over


@dataclass
class Starts:
    """Servers of an engine, which follow its chain in its store."""

    followed: Followed
    monkeypatch: pytest.MonkeyPatch

    def server(self, **environment: object) -> Control:
        store = self.followed.faulty
        variables = {"SPOOL": self.followed.folder / "spool", "URL": self.followed.store.url}
        for name, value in (variables | environment).items():
            self.monkeypatch.setenv(f"DELTACHAIN_{name}", str(value))
        if "URL" not in environment:
            opened = "deltachain.subscribe.subscriber.open_store"
            self.monkeypatch.setattr(opened, lambda *_, **__: store)

        def find(_: ReplicaSettings) -> LedEngine:
            return self.followed.engine, self.followed.folder / "model"

        return asyncio.run(lead(find, os.environ, is_open=True, is_guarded=False))

    def refused(self, **environment: object) -> object:
        """The exit code of a server that ends at its start."""
        with pytest.raises(SystemExit) as ended:
            self.server(**environment)
        return ended.value.code


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Starts]:
    for here in followed(tmp_path):
        yield Starts(here, monkeypatch)


@pytest.fixture
def stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Starts]:
    """An engine that gives no way to one of its tensors."""
    made = Followed(Sharding(tp=2, odd=("stuck",)), tmp_path / "stuck")
    yield Starts(made, monkeypatch)
    made.close()


def led(control: Control) -> Leader:
    return present(control.leader)


def test_a_tensor_without_a_way_ends_the_server_and_is_told_by_its_presence(
    stuck: Starts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    board = tmp_path / "replicas"
    with caplog.at_level(logging.ERROR):
        assert stuck.refused(PRESENCE_URL=board) == 6
    assert "so this server exits" in caplog.text
    assert "stuck" in caplog.text
    assert "DELTACHAIN_STRICT=0" in caplog.text
    (file,) = board.iterdir()
    assert "stuck" in (parse_record(file.read_bytes(), "x").ended or "")


def test_it_serves_what_it_loaded_where_it_was_told_to(stuck: Starts) -> None:
    leader = led(stuck.server(STRICT=0, FOLLOW=1))
    status = leader.status()
    leader.stop()
    assert (status.ready, status.version, status.following) == (False, None, False)
    assert status.trouble


@pytest.fixture
def damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 finds that nothing leads back from what was tried on it."""
    ranks = iter((0, 1))

    def restore_outputs(*_: object) -> None:
        if next(ranks, 0):
            raise EngineDamagedError("a layer computes something else")

    monkeypatch.setattr("deltachain.replica.layout.discover.restore_outputs", restore_outputs)


@pytest.mark.usefixtures("damaged")
def test_a_damaged_engine_ends_whatever_it_was_told(
    stuck: Starts, caplog: pytest.LogCaptureFixture
) -> None:
    assert stuck.refused(STRICT=0) == 6
    assert "rank 1: a layer computes something else" in caplog.text
    assert "DELTACHAIN_STRICT" not in caplog.text


@pytest.mark.usefixtures("damaged")
def test_an_engine_that_is_damaged_later_generates_nothing(starts: Starts) -> None:
    here = starts.followed
    here.faulty.down = True
    leader = led(starts.server(STRICT=0))
    here.faulty.down = False
    assert not here.engine.is_paused()
    with pytest.raises(EngineDamagedError):
        leader.update()
    assert here.engine.is_paused()
    leader.stop()


@pytest.mark.parametrize("refusal", [ConfigError, EngineVersionError])
def test_an_engine_that_cannot_be_led_ends(
    monkeypatch: pytest.MonkeyPatch, refusal: type[ConfigError]
) -> None:
    def find(_: ReplicaSettings) -> LedEngine:
        raise refusal("this engine is another")

    monkeypatch.setenv("DELTACHAIN_URL", "memory://nowhere")
    with pytest.raises(SystemExit) as ended:
        asyncio.run(lead(find, os.environ, is_open=True, is_guarded=False))
    assert ended.value.code == 2
    monkeypatch.setenv("DELTACHAIN_STRICT", "0")
    control = asyncio.run(lead(find, os.environ, is_open=True, is_guarded=False))
    assert (control.leader, control.refusal) == (None, str(refusal("this engine is another")))


def test_a_setting_that_means_nothing_ends_it(starts: Starts) -> None:
    assert starts.refused(FOLLOWS=1)


def test_a_presence_inside_the_chain_ends_the_server(starts: Starts) -> None:
    assert starts.refused(PRESENCE_URL=f"{starts.followed.store.url}/replicas") == 2


def test_a_store_that_is_away_is_waited_for(starts: Starts) -> None:
    starts.followed.faulty.down = True
    leader = led(starts.server())
    assert not leader.status().ready
    starts.followed.faulty.down = False
    leader.update()
    assert leader.status().ready
    leader.stop()


def test_a_chain_that_is_not_there_yet_is_waited_for(starts: Starts, tmp_path: Path) -> None:
    leader = led(starts.server(URL=(tmp_path / "chain").as_uri()))
    assert not leader.status().ready
    leader.stop()


def test_a_server_waits_for_the_others_of_its_group(starts: Starts, tmp_path: Path) -> None:
    board = tmp_path / "replicas"
    leader = led(starts.server(PRESENCE_URL=board, TOGETHER="policy@2"))
    status = leader.status()
    assert not status.ready
    assert "1 of 2 replicas of group 'policy'" in status.trouble
    (mine,) = (board / "together" / "policy").iterdir()
    mine.with_name("other").write_bytes(b"1")
    leader.update()
    assert leader.status().ready
    leader.stop()


def test_a_server_shows_its_presence_and_takes_it_away(starts: Starts, tmp_path: Path) -> None:
    board = tmp_path / "replicas"
    control = starts.server(PRESENCE_URL=board)
    assert {"presence_failures", "version"} <= {figure.name for figure in control.figures()}
    app = FastAPI()
    app.state.deltachain = control
    eventually((board / present(control.presence).key).exists)
    leave_at_end(app)

    async def live() -> None:
        async with app.router.lifespan_context(app):
            pass

    asyncio.run(live())
    led(control).stop()
    assert [*board.iterdir()] == []
