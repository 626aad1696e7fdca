import asyncio
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event

import pytest
from fastapi import FastAPI

from deltachain.control.replica_client import ReplicaClient
from deltachain.control.roster import Roster
from deltachain.control.server import Control, LedEngine, lead, leave_at_end
from deltachain.errors import ConfigError, ControlPlaneError, EngineDamagedError, EngineVersionError
from deltachain.presence.record import parse_record
from deltachain.replica.settings import ReplicaSettings
from deltachain.status import Status
from tests.support.engine import Sharding
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


def test_a_name_is_looked_up_in_every_round() -> None:
    with Roster(["dns://localhost:9"]) as roster:
        for _ in range(2):
            answers = dict(roster.ask(lambda _: status()))
            assert "http://127.0.0.1:9" in answers


@pytest.mark.parametrize("address", ["ftp://a", "http://", "a:8000"])
def test_an_invalid_address_is_an_error_before_anybody_is_asked(address: str) -> None:
    with pytest.raises(ConfigError, match="not a server address"):
        Roster(["http://a", address])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Followed]:
    monkeypatch.setenv("DELTACHAIN_SPOOL", str(tmp_path / "spool"))
    yield from followed(tmp_path)


def started(here: Followed, monkeypatch: pytest.MonkeyPatch, **environment: str) -> Control:
    """What a server has once its start is over."""
    for name, value in environment.items():
        monkeypatch.setenv(f"DELTACHAIN_{name}", value)

    def find(_: ReplicaSettings) -> LedEngine:
        return here.engine, here.folder / "model"

    return asyncio.run(lead(find, os.environ, is_open=True, is_guarded=False))


@pytest.fixture
def stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Followed]:
    """An engine that gives no way to one of its tensors."""
    monkeypatch.setenv("DELTACHAIN_SPOOL", str(tmp_path / "stuck" / "spool"))
    made = Followed(Sharding(tp=2, odd=("stuck",)), tmp_path / "stuck")
    yield made
    made.close()


def store_of(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "deltachain.subscribe.subscriber.open_store", lambda *_, **__: followed.faulty
    )


def test_a_tensor_without_a_way_ends_the_server(
    stuck: Followed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store_of(stuck, monkeypatch)
    with caplog.at_level(logging.ERROR), pytest.raises(SystemExit) as ended:
        started(stuck, monkeypatch, URL=stuck.store.url)
    assert ended.value.code == 6
    assert "so this server exits" in caplog.text
    assert "stuck" in caplog.text
    assert "DELTACHAIN_STRICT=0" in caplog.text


def test_it_serves_what_it_loaded_where_it_was_told_to(
    stuck: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_of(stuck, monkeypatch)
    control = started(stuck, monkeypatch, URL=stuck.store.url, STRICT="0", FOLLOW="1")
    assert control.leader is not None
    status = control.leader.status()
    control.leader.stop()
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
    stuck: Followed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store_of(stuck, monkeypatch)
    with pytest.raises(SystemExit) as ended:
        started(stuck, monkeypatch, URL=stuck.store.url, STRICT="0")
    assert ended.value.code == 6
    assert "rank 1: a layer computes something else" in caplog.text
    assert "DELTACHAIN_STRICT" not in caplog.text


@pytest.mark.usefixtures("damaged")
def test_an_engine_that_is_damaged_later_generates_nothing(
    here: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_of(here, monkeypatch)
    here.faulty.down = True
    control = started(here, monkeypatch, URL=here.store.url, STRICT="0")
    here.faulty.down = False
    assert control.leader is not None
    assert not here.engine.is_paused()
    with pytest.raises(EngineDamagedError):
        control.leader.update()
    assert here.engine.is_paused()
    control.leader.stop()


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


def test_a_setting_that_means_nothing_ends_it(
    here: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit):
        started(here, monkeypatch, URL=here.store.url, FOLLOWS="1")


def test_a_store_that_is_away_is_waited_for(
    here: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_of(here, monkeypatch)
    here.faulty.down = True
    control = started(here, monkeypatch, URL=here.store.url)
    assert control.leader is not None
    assert not control.leader.status().ready
    here.faulty.down = False
    control.leader.update()
    assert control.leader.status().ready
    control.leader.stop()


def test_a_chain_that_is_not_there_yet_is_waited_for(
    here: Followed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = started(here, monkeypatch, URL=(tmp_path / "chain").as_uri())
    assert control.leader is not None
    assert not control.leader.status().ready
    control.leader.stop()


def test_a_server_shows_its_presence_and_takes_it_away(
    here: Followed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store_of(here, monkeypatch)
    board = tmp_path / "replicas"
    control = started(here, monkeypatch, URL=here.store.url, PRESENCE_URL=str(board))
    assert control.leader is not None
    assert control.presence is not None
    assert {"presence_failures", "version"} <= {figure.name for figure in control.figures()}
    app = FastAPI()
    app.state.deltachain = control
    while not (board / control_key(control)).exists():
        pass
    leave_at_end(app)

    async def live() -> None:
        async with app.router.lifespan_context(app):
            pass

    asyncio.run(live())
    control.leader.stop()
    assert [*board.iterdir()] == []


def control_key(control: Control) -> str:
    assert control.presence is not None
    return control.presence.key


def test_a_presence_inside_the_chain_ends_the_server(
    here: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{here.store.url}/replicas"
    with pytest.raises(SystemExit) as ended:
        started(here, monkeypatch, URL=here.store.url, PRESENCE_URL=url)
    assert ended.value.code == 2


def test_a_refused_server_leaves_the_reason(
    stuck: Followed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store_of(stuck, monkeypatch)
    board = tmp_path / "replicas"
    with pytest.raises(SystemExit):
        started(stuck, monkeypatch, URL=stuck.store.url, PRESENCE_URL=str(board))
    (file,) = board.iterdir()
    assert "stuck" in (parse_record(file.read_bytes(), "x").ended or "")
