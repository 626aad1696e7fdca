"""Several callers at once, a second leader, and weights that are loaded behind our back."""

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Final, Self

import pytest

from deltachain.control.agent import Agent, ReloadServer
from deltachain.subscribe import SubscribeConfig
from tests.engines.expected import Judge, holds
from tests.engines.replica import error_of, replicas, serving
from tests.engines.serving import Server, clients, start
from tests.engines.trainer import Trainer


def test_every_version_is_loaded_and_named(trainer: Trainer, tmp_path: Path) -> None:
    with start(trainer.base, tmp_path / "server", plain=True, dev=True) as server:
        reader = ReloadServer(str(server.client.base_url))
        config = SubscribeConfig(url=trainer.url, undo_applies=0)
        with Agent(config, tmp_path / "policy", reader) as agent:
            for _ in range(3):
                version = trainer.step()
                agent.update()
                assert server.named() == str(version)
                assert not server.paused()
                assert holds(server, trainer.pulled(version))
            said = server.generate([5, 6, 7], 8)
            assert said.spans == ((0, 8, "3"),)


pytestmark = [pytest.mark.engine, pytest.mark.slow]

VERSIONS = 12

LENGTH = 24


class Callers:
    PATHS: Final = ("update", "rollback", "release", "scrub")
    REFUSALS: Final = {
        "rollback": "cannot roll back",  # there is nothing to go back to yet
        "update": "was staged before another swap",  # a rollback does not wait for an update
    }

    def __init__(self, server: Server) -> None:
        self.server = server
        self.answered: Counter[tuple[str, int]] = Counter()
        self.failures: list[str] = []
        self._stop = Event()
        alone = [partial(self._tell, path) for path in self.PATHS]
        actions = [*alone, partial(self._tell, "pause", "resume"), self._look]
        self._threads = [Thread(target=self._loop, args=(action,)) for action in actions]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _loop(self, action: Callable[[], None]) -> None:
        while not self._stop.is_set():
            try:
                action()
            except Exception as exc:  # noqa: BLE001 - the test reads them
                self.failures.append(repr(exc))
                return

    def _tell(self, *paths: str) -> None:
        for path in paths:
            response = self.server.post(path)
            self.answered[path, response.status_code] += 1
            if response.status_code != 200:
                message = error_of(response, 409)["message"]
                assert self.REFUSALS.get(path, "?") in message, (path, message)

    def _look(self) -> None:
        status = self.server.status()
        assert not status["poisoned"]
        trouble = status["trouble"]
        assert not trouble or any(refusal in trouble for refusal in self.REFUSALS.values())


@pytest.mark.parametrize("tp", [1, 2])
def test_callers_at_once_never_make_a_mixture(tmp_path: Path, tp: int) -> None:
    following = {"DELTACHAIN_FOLLOW": "1", "DELTACHAIN_POLL_S": "0.05"}
    with replicas(tmp_path, tp, environment=following) as replica:
        server, trainer = replica.server, replica.trainer
        with (
            clients(server, streams=2, labelled=2, length=LENGTH, applied=lambda: 0) as seen,
            Callers(server) as callers,
        ):
            for _ in range(VERSIONS):
                trainer.step()
                time.sleep(0.5)
        assert callers.failures + seen.failures == []
        told = (*callers.PATHS, "pause", "resume")
        assert all(callers.answered[path, 200] for path in told), callers.answered
        assert replica.is_settled()
        judges = [Judge(trainer.pulled(version)) for version in range(VERSIONS + 1)]
        spans = [(answer, *span) for _, answer in seen.generated for span in answer.spans]
        assert len({label for *_, label in spans}) > 2
        for answer, start, end, label in spans:
            judge = judges[int(label)]
            assert judge.wrong(answer.prompt, answer.tokens, range(start, end)) == []


@pytest.mark.parametrize("tp", [1, 2])
def test_weights_that_somebody_loads_are_found(trainer: Trainer, tmp_path: Path, tp: int) -> None:
    with serving(trainer, tmp_path, tp, plain=False) as replica:
        server = replica.server
        server.update(trainer.step())
        assert server.post("scrub").json()["last"]["previous"] == 0
        assert replica.goes_on_as(1)
        server.load(trainer.base)
        if not server.sees_loads:
            assert replica.goes_on_as(0, label=1)
            server.post("scrub")
        status = server.status()
        found = (status["version"], status["poisoned"], status["last"]["previous"])
        assert found == (1, False, None), "healed from nothing"
        assert replica.goes_on_as(1)
