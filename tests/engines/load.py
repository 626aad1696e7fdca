"""Clients that keep a server busy, and what they saw."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Final

from tests.engines.serving import Generated, Server

VOCABULARY: Final = range(3, 500)


@dataclass(slots=True)
class Seen:
    finished: list[tuple[int, str]] = field(default_factory=list)
    generated: list[tuple[int, Generated]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def prompt(dice: random.Random, length: int = 10) -> list[int]:
    return dice.choices(VOCABULARY, k=length)


@contextmanager
def clients(
    server: Server, *, streams: int, labelled: int, length: int, applied: Callable[[], int]
) -> Iterator[Seen]:
    """Keep asking from as many threads until this is left; every answer has been awaited then."""
    seen, stop = Seen(), Event()

    def loop(once: Callable[[random.Random], None], seed: int) -> None:
        dice = random.Random(seed)
        while not stop.is_set():
            try:
                once(dice)
            except Exception as exc:  # noqa: BLE001 - the test reads them
                seen.failures.append(repr(exc))
                stop.wait(0.2)

    def stream(dice: random.Random) -> None:
        seen.finished.append(server.stream(prompt(dice), length))

    def label(dice: random.Random) -> None:
        known = applied()
        seen.generated.append((known, server.generate(prompt(dice), length)))

    calls = [stream] * streams + [label] * labelled
    threads = [Thread(target=loop, args=(call, seed)) for seed, call in enumerate(calls)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        stop.set()
        for thread in threads:
            thread.join()
