"""All replicas asked at once: who hangs delays nobody."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Event

import pytest

from deltachain.control.replica_client import ReplicaClient
from deltachain.control.roster import Roster
from deltachain.errors import ConfigError, ControlPlaneError
from deltachain.status import Status
from tests.unit.control.statuses import status


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
