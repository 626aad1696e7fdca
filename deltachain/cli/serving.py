"""What commands share that go on until they are stopped: their end, metrics and presence."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from queue import SimpleQueue
from threading import Event, Thread
from types import FrameType
from typing import TYPE_CHECKING, Final

import typer

from deltachain import environment
from deltachain.cli import console as c
from deltachain.errors import ConfigError, DeltaChainError

if TYPE_CHECKING:
    from deltachain.metrics import FigureSource
    from deltachain.status import Status
    from deltachain.subscribe import Subscriber


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


@contextmanager
def shown_follower(
    subscriber: "Subscriber",
    address: str | None,
    *,
    engine: str,
    place: str,
    follows: bool,
    why_unready: Callable[[], str] = lambda: "",
) -> Iterator[Callable[[DeltaChainError | None], None]]:
    from deltachain.presence.writer import follower_status
    from deltachain.subscribe.receipt import Tally
    from deltachain.subscribe.subscriber import subscriber_figures

    tally, given = Tally(), environment.read(os.environ)
    trouble: DeltaChainError | None = None

    def looked(exc: DeltaChainError | None) -> None:
        nonlocal trouble
        trouble = exc
        if exc is None:
            tally.count(subscriber.last)
        else:
            tally.failures += 1

    def status() -> "Status":
        unready = why_unready()
        return follower_status(subscriber, given, engine=engine, trouble=trouble, unready=unready)

    figures = partial(subscriber_figures, subscriber, tally, engine=engine)
    chains = [subscriber.config.url]
    with shown(address, figures, status, place=place, chains=chains, follows=follows):
        yield looked


@contextmanager
def shown(
    address: str | None,
    source: "FigureSource",
    status: "Callable[[], Status]",
    *,
    place: str,
    chains: Sequence[str],
    follows: bool,
) -> Iterator[None]:
    if address is not None and not follows:
        raise ConfigError("--metrics is for a command that follows, and this one ends by itself")
    board = environment.read_one(os.environ, "PRESENCE_URL") if follows else None
    sources: list[FigureSource] = [source]
    with ExitStack() as stack:
        if board is not None:
            from deltachain.presence.writer import PresenceWriter

            writer = PresenceWriter(
                board, status, engine=status().engine, place=place, apart_from=chains
            )
            stack.enter_context(writer)
            sources.append(writer.figures)
        if address is not None:
            from deltachain.metrics import MetricsServer

            server = MetricsServer(
                address,
                lambda: chain.from_iterable(one() for one in sources),
                lambda: status().reason,
            )
            c.say(f"metrics at {stack.enter_context(server).url}/metrics", "dim")
        yield
