"""Metrics of commands that follow a chain: ``--metrics``."""

# ruff: noqa: PLC0415 - dependencies are imported when the command runs
from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from deltachain import environment
from deltachain.cli import console as c
from deltachain.errors import ConfigError, DeltaChainError

if TYPE_CHECKING:
    from deltachain.figures import FigureSource
    from deltachain.subscribe import Subscriber


def follower_metrics(
    subscriber: Subscriber, address: str | None, *, engine: str, follows: bool
) -> AbstractContextManager[Callable[[DeltaChainError | None], None]]:
    """Serve the metrics of a subscriber in a context.

    Args:
        subscriber: The subscriber.
        address: Where, as ``--metrics`` gives it; ``None`` for nowhere.
        engine: What the subscriber writes into; see :func:`deltachain.figures.info`.
        follows: Whether the command goes on after one update.

    Returns:
        The context, whose value must be called after each iteration of following.

    Raises:
        ConfigError: The address is invalid or cannot be bound, or the command does not go on.
    """
    if address is None:
        return nullcontext(lambda _: None)
    _check_follows(follows=follows)
    from deltachain.subscribe.figures import subscriber_figures
    from deltachain.subscribe.totals import Tally

    tally = Tally()

    def looked(trouble: DeltaChainError | None) -> None:
        if trouble is None:
            tally.count(subscriber.last)
        else:
            tally.failures += 1

    figures = partial(subscriber_figures, subscriber, tally, engine=engine)
    given = environment.read(os.environ)
    return _served(address, figures, partial(_unready, subscriber, given), looked)


def served_metrics(
    address: str | None, source: FigureSource, *, follows: bool
) -> AbstractContextManager[object]:
    """Serve figures in a context, if an address is given; see :func:`follower_metrics`."""
    if address is None:
        return nullcontext()
    _check_follows(follows=follows)
    return _served(address, source, lambda: "", None)


def _check_follows(*, follows: bool) -> None:
    if not follows:
        raise ConfigError("--metrics is for a command that follows, and this one ends by itself")


@contextmanager
def _served(
    address: str,
    source: FigureSource,
    unready: Callable[[], str],
    value: Any,  # noqa: ANN401 - passed on
) -> Iterator[Any]:
    from deltachain.metrics import MetricsServer

    with MetricsServer(address, source, unready) as server:
        c.say(f"metrics at {server.url}/metrics", "dim")
        yield value


def _unready(subscriber: Subscriber, given: dict[str, Any]) -> str:
    """Return why a follower does not do its work; empty if it does."""
    from deltachain.replica.readiness import Condition, why_unready

    chain, doubt = subscriber.opened, subscriber.watch.doubt
    condition = Condition(
        version=subscriber.version,
        newest=chain.latest if chain else None,
        poisoned=subscriber.poisoned,
        released=(),
        paused=False,
        doubt=str(doubt.args[0]) if doubt else "",
        ended="",
        pinned=subscriber.pinned,
        caught_up=True,
        follows=True,
        silence_s=subscriber.times.silence_s,
        max_lag=given.get("MAX_LAG"),
        max_silence_s=given.get("MAX_SILENCE_S"),
    )
    return why_unready(condition)
