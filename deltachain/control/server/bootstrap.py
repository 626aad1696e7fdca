"""Start the leader of a server's engine, and the access control in front of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from deltachain.control.server.auth import Control, aside
from deltachain.control.server.refusal import refused
from deltachain.environment import is_strict
from deltachain.errors import DeltaChainError, EngineDamagedError
from deltachain.replica.engine import Engine
from deltachain.replica.leader import REFUSALS, Leader
from deltachain.replica.settings import ReplicaSettings

logger = logging.getLogger(__name__)


class LedEngine(NamedTuple):
    """An engine that a leader can lead.

    Attributes:
        engine: Its ranks and its scheduler.
        checkpoint: The folder that it loaded, for a chain that begins with that.
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
) -> Control:
    """Lead the engine of this server along the chain that the environment names, if any.

    Returns once it has caught up, or has to wait: for a store that is away, or a chain that does
    not exist yet. If the engine is refused and ``DELTACHAIN_STRICT`` is off, the server starts all
    the same, and the routes say why it follows nothing.

    Args:
        find: Returns the engine; may refuse with any :class:`DeltaChainError`.
        environment: Variables of this process.
        is_open: Whether the server listens on the loopback interface alone.
        is_guarded: Whether the engine asks for a key of its own before our routes.
        key: The bearer token where ``DELTACHAIN_TOKEN`` is not set.

    Raises:
        SystemExit: The engine is refused, or damaged; the log says why.
    """
    leader, token, refusal = None, key, "DELTACHAIN_URL is not set: this server follows no chain"
    try:
        settings = ReplicaSettings.of(environment)
        if settings is not None:
            token = settings.token or key
            engine, checkpoint = find(settings)
            base = settings.subscribe.base or checkpoint
            settings = replace(settings, subscribe=replace(settings.subscribe, base=base))
            leader = Leader(settings, engine)
            await aside(Leader.start, leader)
    except DeltaChainError as exc:
        is_damaged = isinstance(exc, EngineDamagedError)
        if is_damaged or (is_strict(environment) and isinstance(exc, REFUSALS)):
            raise refused(exc) from exc
        leader, refusal = None, str(exc)
        logger.warning("deltachain follows nothing: %s", exc)
    return Control(leader, refusal, token=token, is_open=is_open, is_guarded=is_guarded)
