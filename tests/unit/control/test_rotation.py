"""A token is replaced on a running fleet of three, and no call fails."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import pytest

from deltachain.control.fleet import Fleet
from deltachain.control.replica_client import ReplicaClient
from deltachain.errors import ControlPlaneError
from deltachain.replica.leader import Leader
from tests.unit.control.replicas import app_of, served
from tests.unit.replica.replicas import Followed


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


class Caller:
    """Asks one replica without a pause, in a thread of its own."""

    def __init__(self, url: str, token: Path) -> None:
        self.calls, self.failures = 0, list[str]()
        self._answered, self._stop = Event(), Event()
        self._thread = Thread(target=self._run, args=(url, token))
        self._thread.start()

    def settle(self) -> None:
        """Wait for the end of a call that began after now."""
        for _ in range(2):
            self._answered.clear()
            assert self._answered.wait(30)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)

    def _run(self, url: str, token: Path) -> None:
        with ReplicaClient(url, token=token) as client:
            while not self._stop.is_set():
                try:
                    client.status()
                except ControlPlaneError as exc:
                    self.failures.append(str(exc))
                self.calls += 1
                self._answered.set()


def put(file: Path, content: str) -> None:
    """Replace a file as a whole: nobody reads half of it, or nothing."""
    written = file.with_name(f"{file.name}.new")
    written.write_text(content)
    written.replace(file)


def rotate(callers: list[Caller], files: list[Path], content: str) -> None:
    """Change one file after another while the callers go on."""
    for file in files:
        put(file, content)
        for caller in callers:
            caller.settle()


def test_a_token_is_rotated_without_a_failed_call(running: Running) -> None:
    callers = [Caller(url, running.mine) for url in running.urls]
    try:
        # Clients have the new token before the servers, the less kind order.
        rotate(callers, [running.mine, *running.files], "new\nold\n")
        rotate(callers, [*running.files, running.mine], "new\n")
    finally:
        for caller in callers:
            caller.stop()
    assert [caller.failures for caller in callers] == [[], [], []]
    assert all(caller.calls >= 16 for caller in callers)
    for url in running.urls:
        with (
            ReplicaClient(url, token="old") as client,  # noqa: S106
            pytest.raises(ControlPlaneError, match="wrong or missing token"),
        ):
            client.status()


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
