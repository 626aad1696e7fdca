"""What commands that follow a chain show of themselves: ``--metrics``, and their presence."""

# ruff: noqa: PLC0415 - dependencies are imported when the command runs
from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from deltachain import environment
from deltachain.cli import console as c
from deltachain.errors import ConfigError, DeltaChainError

if TYPE_CHECKING:
    from deltachain.figures import FigureSource
    from deltachain.status import Status
    from deltachain.subscribe import Subscriber


@contextmanager
def shown_follower(
    subscriber: Subscriber,
    address: str | None,
    *,
    engine: str,
    place: str,
    follows: bool,
    why_unready: Callable[[], str] = lambda: "",
) -> Iterator[Callable[[DeltaChainError | None], None]]:
    """Show a subscriber as :func:`shown`; yield what must be called after each iteration."""
    from deltachain.presence.writer import follower_status
    from deltachain.subscribe.figures import subscriber_figures
    from deltachain.subscribe.receipt import Tally

    tally, given = Tally(), environment.read(os.environ)
    trouble: DeltaChainError | None = None

    def looked(exc: DeltaChainError | None) -> None:
        nonlocal trouble
        trouble = exc
        if exc is None:
            tally.count(subscriber.last)
        else:
            tally.failures += 1

    def status() -> Status:
        unready = why_unready()
        return follower_status(subscriber, given, engine=engine, trouble=trouble, unready=unready)

    figures = partial(subscriber_figures, subscriber, tally, engine=engine)
    chains = [subscriber.config.url]
    with shown(address, figures, status, place=place, chains=chains, follows=follows):
        yield looked


@contextmanager
def shown(
    address: str | None,
    source: FigureSource,
    status: Callable[[], Status],
    *,
    place: str,
    chains: Sequence[str],
    follows: bool,
) -> Iterator[None]:
    """Serve figures in a context, and write a presence, as far as either is asked for."""
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
