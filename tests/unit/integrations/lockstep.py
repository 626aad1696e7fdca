"""A trial in another environment, its ranks, and the test that reads its lines, in lockstep."""

import asyncio
import inspect
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Final

LINES: Final = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # frameworks log to the standard output


def tell(*said: Any) -> None:
    LINES.write(f"{json.dumps(said)}\n")
    LINES.flush()
    assert sys.stdin.readline(), "nobody waits for the next step"


class Ranks:
    """Processes that are forked once all is imported; each has an object, and calls its methods."""

    def __init__(self, ranks: int, port: int, make: Callable[[int], Any]) -> None:
        forked, self._pipes = multiprocessing.get_context("fork"), list[Connection]()
        for rank in range(ranks):
            ours, theirs = forked.Pipe()
            host = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
            own = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo", **host}
            given = (theirs, own, make, rank)
            forked.Process(target=_serve, args=given, daemon=True).start()
            self._pipes.append(ours)

    def each(self, method: str, *arguments: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((method, arguments))
        return [pipe.recv() for pipe in self._pipes]  # EOFError: see the log


def _serve(pipe: Connection, own: dict[str, str], make: Callable[[int], Any], rank: int) -> None:
    os.environ |= own
    subject = make(rank)
    while True:
        method, arguments = pipe.recv()
        found = getattr(subject, method)(*arguments)
        pipe.send(asyncio.run(found) if inspect.iscoroutine(found) else found)
