"""A trainer and a server that follows it, and what must be true of the two after anything."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.engines import strikes
from tests.engines.expected import Judge, holds
from tests.engines.serving import STOP_S, Generated, Server, prompt, start
from tests.engines.trainer import Trainer


class Replica:
    """A server with plain linears and vLLM's development routes, and the trainer of its chain."""

    def __init__(self, trainer: Trainer, server: Server, tp: int, strikes: Path, last: int) -> None:
        self.trainer, self.server, self.tp, self.strikes = trainer, server, tp, strikes
        self.last = last  # rank of the last engine
        self.judge = cache(lambda version: Judge(trainer.pulled(version)))

    @property
    def store(self) -> Path:
        return Path(urlsplit(self.trainer.url).path)

    def payload(self, version: int) -> Path:
        return next((self.store / "deltas").glob(f"{version:020d}-*")) / "00000.safetensors"

    def strike(self, at: str, **how: Any) -> None:
        strikes.order(self.strikes, at, rank=self.last, **how)

    def is_struck(self) -> bool:
        return not self.strikes.exists()

    def holds(self, version: int) -> bool:
        return (
            self.server.status()["version"] == version
            and self.server.named() == str(version)
            and self.has(self.trainer.pulled(version))
        )

    def has(self, checkpoint: Path) -> bool:
        return holds(self.server, checkpoint, self.tp)

    def serves(self, version: int) -> bool:
        """Whether it is ready, and generates with what it holds."""
        return self.server.get("ready").status_code == 200 and self.generates_with(version)

    def generates_with(self, version: int) -> bool:
        return self.server.generate([5, 6, 7], 4).spans == ((0, 4, str(version)),)

    def goes_on_as(self, version: int, *, label: int | None = None) -> bool:
        """Whether new prompts get the tokens of a version, and some are not its neighbours'."""
        said = str(version if label is None else label)
        dice = random.Random(version)
        answers = [self.server.generate(prompt(dice), 24) for _ in range(8)]
        assert {answer.spans for answer in answers} == {((0, 24, said),)}
        right = [
            v
            for v in range(self.trainer.head + 1)
            if not any(self.judge(v).wrong(a.prompt, a.tokens, range(24)) for a in answers)
        ]
        return right == [version]

    def ready_for(self, within_s: float) -> float:
        """Return for how many seconds it is still ready, once a rank was killed."""
        client, began, last = self.server.client, time.monotonic(), 0.0
        client.timeout, usual = 2, client.timeout
        while self.server.alive and 200 in self.server.readiness():
            last = time.monotonic() - began
            assert last < within_s, "it stays ready without a rank"
        client.timeout = usual
        return last

    def last_words(self, asked: list[int], within_s: float = STOP_S) -> list[Generated]:
        """Return what it answers, once a rank was killed, until it ends."""
        client, until, said = self.server.client, time.monotonic() + within_s, []
        client.timeout, usual = 2, client.timeout
        while self.server.alive and time.monotonic() < until:
            with suppress(httpx.TransportError, AssertionError):
                said.append(self.server.generate(asked, 4))
        client.timeout = usual
        return said

    def stands_still(self) -> bool:
        paused = self.server.paused()
        codes = (self.server.get("ready").status_code, self.server.post("resume").status_code)
        return paused and self.server.paused() and codes == (503, 409)

    def is_settled(self) -> bool:
        self.strikes.unlink(missing_ok=True)
        self.server.post("release")
        self.server.update()
        self.server.post("resume")
        head = self.trainer.head
        status = self.server.status()
        return (
            self.holds(head)
            and self.serves(head)
            and status["trouble"] == ""
            and not status["poisoned"]
            and self.server.post("scrub").json()["version"] == head
        )


@contextmanager
def replicas(folder: Path, tp: int = 1, *, url: str = "", **options: Any) -> Iterator[Replica]:
    with Trainer(folder, url) as trainer, serving(trainer, folder, tp, **options) as replica:
        yield replica


@contextmanager
def serving(trainer: Trainer, folder: Path, tp: int = 1, **options: Any) -> Iterator[Replica]:
    order = folder / "strike"
    settings = {"plain": True, "dev": True, "strikes": order, **options}
    base = settings.pop("base", trainer.base)
    with start(base, folder / "server", trainer.url, tp=tp, **settings) as server:
        yield Replica(trainer, server, tp, order, tp * settings.get("dp", 1) - 1)


def error_of(response: httpx.Response, code: int) -> dict[str, Any]:
    assert response.status_code == code, response.text
    error = response.json()["error"]
    assert error["message"]
    return dict(error)
