"""How a replica inside an engine behaves, from its environment; see :mod:`deltachain.environment`.

The engine starts the processes, so their environment is what they have in common.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from deltachain.environment import is_strict, read
from deltachain.subscribe.config import SubscribeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """Settings of a replica; each is an environment variable, ``DELTACHAIN_`` and its name.

    Attributes:
        subscribe: ``URL``, and ``BASE``, ``POLL_S``, ``STAGE_BUDGET`` where given.
        follow: ``FOLLOW``: whether it applies versions as they are committed.
        strict: ``STRICT``: whether a server that cannot follow ends at its start.
        pause: ``PAUSE``: what becomes of running requests; the engine knows its modes.
        keep_cache: ``KEEP_CACHE``: whether cached prefixes outlive a swap.
        token: ``TOKEN``: what callers of the control routes must know; empty for none.
        max_lag: ``MAX_LAG``: versions behind the newest one seen up to which the replica is ready.
    """

    subscribe: SubscribeConfig
    follow: bool = False
    strict: bool = True
    pause: str = ""
    keep_cache: bool = False
    token: str = field(default="", repr=False)
    max_lag: int | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> ReplicaSettings | None:
        """Settings out of environment variables; ``None`` where no chain is named.

        Raises:
            ConfigError: A ``DELTACHAIN_*`` variable is not known, or its value means nothing.
        """
        given = read(environment)
        if "URL" not in given:
            return None
        subscribe = SubscribeConfig(
            url=given["URL"], base=given.get("BASE"), poll_s=given.get("POLL_S")
        )
        if "STAGE_BUDGET" in given:
            subscribe = replace(subscribe, stage_budget=given["STAGE_BUDGET"])
        return cls(
            subscribe=subscribe,
            follow=given.get("FOLLOW", False),
            strict=is_strict(environment),
            pause=given.get("PAUSE", ""),
            keep_cache=given.get("KEEP_CACHE", False),
            token=given.get("TOKEN", ""),
            max_lag=given.get("MAX_LAG"),
        )


def spool_folder(environment: Mapping[str, str]) -> Path:
    """Where plans are decoded for the ranks of a host: ``DELTACHAIN_SPOOL``, or one a user."""
    given = environment.get("DELTACHAIN_SPOOL", "")
    return Path(given) if given else Path(tempfile.gettempdir()) / f"deltachain-{os.getuid()}"
