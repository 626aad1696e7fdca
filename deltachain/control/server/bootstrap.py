"""Startup of a replica: creates the leader of an engine and its authorization."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import FastAPI

from deltachain.control.server.auth import Control, aside
from deltachain.control.server.refusal import refused
from deltachain.environment import is_strict
from deltachain.errors import DeltaChainError, EngineDamagedError
from deltachain.metrics import register_figures
from deltachain.presence.writer import PresenceWriter, replica_presence
from deltachain.replica.engine import Engine
from deltachain.replica.leader import REFUSALS, Leader
from deltachain.replica.settings import ReplicaSettings
from deltachain.tokens import Tokens

logger = logging.getLogger(__name__)


class LedEngine(NamedTuple):
    """An engine with its checkpoint.

    Attributes:
        engine: Ranks and scheduler of the engine.
        checkpoint: Folder it was loaded from, used as base checkpoint of the chain.
    """

    engine: Engine
    checkpoint: Path


async def lead(
    find: Callable[[ReplicaSettings], LedEngine],
    environment: Mapping[str, str],
    *,
    is_open: bool,
    is_guarded: bool,
    key: str = "",
    address: str = "",
) -> Control:
    """Start following the chain of ``DELTACHAIN_URL`` with this server's engine, if it is set.

    Returns once the replica is at the head, or must wait for an unavailable store or a chain that
    does not exist yet. If the engine is refused and ``DELTACHAIN_STRICT`` is false, the server
    starts anyway, and the routes report the reason.

    Args:
        find: Returns the engine; may raise any :class:`DeltaChainError`.
        environment: Variables of this process.
        is_open: Whether the server listens on the loopback interface alone.
        is_guarded: Whether the engine checks an API key of its own before these routes.
        key: Required token if neither ``DELTACHAIN_TOKEN`` nor ``DELTACHAIN_TOKEN_FILE`` is set.
        address: Where the server listens; tells its presence from those of others on this machine.

    Raises:
        SystemExit: The engine is refused or damaged; the reason is logged.
    """
    leader, refusal = None, "DELTACHAIN_URL is not set: this server follows no chain"
    presence: PresenceWriter | None = None
    token: str | Path = key
    try:
        settings = ReplicaSettings.of(environment)
        if settings is not None:
            Tokens(settings.token)  # a wrong file is found before the engine is touched
            token = settings.token or key
            engine, checkpoint = find(settings)
            base = settings.subscribe.base or checkpoint
            settings = replace(settings, subscribe=replace(settings.subscribe, base=base))
            leader = Leader(settings, engine)
            presence = replica_presence(
                settings, leader.status, engine=engine.software, place=address
            )
            await aside(Leader.start, leader)
    except DeltaChainError as exc:
        if presence is not None:
            presence.fail(str(exc.args[0]))
        is_damaged = isinstance(exc, EngineDamagedError)
        if is_damaged or (is_strict(environment) and isinstance(exc, REFUSALS)):
            raise refused(exc) from exc
        leader, refusal = None, str(exc)
        logger.warning("deltachain follows no chain: %s", exc)
    return Control(
        leader, refusal, token=token, is_open=is_open, is_guarded=is_guarded, presence=presence
    )


def leave_at_end(app: FastAPI, trouble: Callable[[], str] = lambda: "") -> None:
    """Make the end of a server's lifespan withdraw the presence of its replica, if it has one.

    Args:
        app: The server's app; its ``state.deltachain`` is a :class:`Control` by then, if ever.
        trouble: Returns why the server ends; empty if it ends as it was told to.
    """
    original = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        async with original(app) as state:
            try:
                yield state
            finally:
                control: Control | None = getattr(app.state, "deltachain", None)
                if control is not None and control.presence is not None:
                    reason, writer = trouble(), control.presence
                    end = partial(writer.fail, reason) if reason else writer.close
                    await asyncio.to_thread(end)

    app.router.lifespan_context = lifespan


def join_registry(control: Control) -> None:
    """Add the figures of a leader to the process' own Prometheus registry, once.

    An engine that serves that registry at its own ``/metrics`` then shows them there. Does nothing
    without a leader or without ``prometheus_client``.
    """
    if control.leader is None:
        return
    with suppress(ModuleNotFoundError):
        register_figures(control.figures)
