"""A rank of a fake engine in a process of its own, asked by messages over a pipe.

Processes are forked from one that has imported this module, torch among others, and started no
thread: an import a rank would take longer than all that the tests do.
"""

import os
import signal
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from deltachain.chain.fetch import fetch_part
from deltachain.errors import StoreUnavailableError
from deltachain.replica import fetcher
from deltachain.replica.rank import RankService
from deltachain.replica.settings import RankSettings
from tests.support.engine import FakeModel, Sharding

PRELOADED = (__name__, "numba", "pytest")
"""Modules that ranks find imported."""


@dataclass(frozen=True)
class RankProcess:
    """A rank and the pipe to it."""

    process: BaseProcess
    pipe: Connection

    @classmethod
    def start(
        cls, number: int, tp: int, checkpoint: Path, spool: Path, fault: str
    ) -> "RankProcess":
        """Start a rank."""
        context = get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        pipe, other = context.Pipe()
        process = context.Process(
            target=serve, args=(other, number, tp, checkpoint, spool, fault), daemon=True
        )
        process.start()
        other.close()
        return cls(process, pipe)

    def ask(self, message: str) -> str:
        """Return the answer of the rank; empty if it has ended."""
        try:
            self.pipe.send(message)
            answer: str = self.pipe.recv()
        except (BrokenPipeError, ConnectionResetError, EOFError):
            return ""
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def serve(
    pipe: Connection, number: int, tp: int, checkpoint: Path, spool: Path, fault: str
) -> None:
    """Answer every message with one, until the other end is closed."""
    model = FakeModel(Sharding(tp=tp), number, checkpoint)
    service = RankService(lambda: model, number, RankSettings(spool=spool))
    fetched = 0

    def faulty(*arguments: Any, **how: Any) -> Any:
        nonlocal fetched
        fetched += 1
        if fetched == 2 and fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fetched >= 2 and fault == "fail":
            raise StoreUnavailableError("the bucket is out of reach")
        return fetch_part(*arguments, **how)

    vars(fetcher)["fetch_part"] = faulty
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            return
        pipe.send(service.answer(message))
