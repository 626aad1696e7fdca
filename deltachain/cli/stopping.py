"""The end of commands that run until they are stopped, by Ctrl-C or SIGTERM."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Event, Thread
from types import FrameType
from typing import Final

import typer

INTERRUPTED: Final = 130  # exit code after Ctrl-C: 128 and the number of SIGINT, as shells have it


@contextmanager
def stopping(stop: Event, wake: Callable[[], None] = lambda: None) -> Iterator[list[int]]:
    """Make Ctrl-C and SIGTERM end a loop between two steps; a second signal ends it at once."""
    by: list[int] = []
    asked: SimpleQueue[bool] = SimpleQueue()

    def handle(number: int, _: FrameType | None) -> None:
        by.append(number)
        asked.put(True)
        if len(by) > 1:
            raise KeyboardInterrupt

    def tell() -> None:
        """Set the event: a handler that did it would wait for its lock if it interrupts a wait."""
        if asked.get():
            stop.set()
            wake()

    teller = Thread(target=tell, name="deltachain-stopping", daemon=True)
    teller.start()
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, handle) for number in signals}
    try:
        yield by
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        asked.put(False)
        teller.join()


def end(by: Sequence[int]) -> None:
    """End a command: with 130 after Ctrl-C, with 0 after SIGTERM, as a service ends."""
    if signal.SIGINT in by:
        raise typer.Exit(INTERRUPTED)
