"""How a replica inside an engine behaves, from its environment.

The engine starts the processes, so their environment is what they have in common.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from deltachain.errors import ConfigError
from deltachain.subscribe.config import SubscribeConfig

TRUE: Final = ("1", "true", "yes", "on")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """Settings of a replica; each is an environment variable, ``DELTACHAIN_`` and its name.

    Attributes:
        subscribe: ``URL``, and ``BASE``, ``POLL_S``, ``STAGE_BUDGET`` where given.
        follow: ``FOLLOW``: whether it applies versions as they are committed.
        pause: ``PAUSE``: what becomes of running requests; the engine knows its modes.
        keep_cache: ``KEEP_CACHE``: whether cached prefixes outlive a swap.
        token: ``TOKEN``: what callers of the control routes must know; empty for none.
        max_lag: ``MAX_LAG``: versions behind the newest one seen up to which the replica is ready.
    """

    subscribe: SubscribeConfig
    follow: bool = False
    pause: str = ""
    keep_cache: bool = False
    token: str = field(default="", repr=False)
    max_lag: int | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> ReplicaSettings | None:
        """Settings out of environment variables; ``None`` where no chain is named.

        Raises:
            ConfigError: A variable holds something else than it should.
        """
        given = {
            name.removeprefix("DELTACHAIN_"): value
            for name, value in environment.items()
            if name.startswith("DELTACHAIN_") and value
        }
        if "URL" not in given:
            return None
        budget = _number(given, "STAGE_BUDGET")
        subscribe = SubscribeConfig(
            url=given["URL"],
            base=Path(given["BASE"]) if "BASE" in given else None,
            poll_s=_number(given, "POLL_S"),
        )
        if budget is not None:
            subscribe = replace(subscribe, stage_budget=int(budget))
        lag = _number(given, "MAX_LAG")
        return cls(
            subscribe=subscribe,
            follow=given.get("FOLLOW", "").lower() in TRUE,
            pause=given.get("PAUSE", ""),
            keep_cache=given.get("KEEP_CACHE", "").lower() in TRUE,
            token=given.get("TOKEN", ""),
            max_lag=None if lag is None else int(lag),
        )


def spool_folder(environment: Mapping[str, str]) -> Path:
    """Where plans are decoded for the ranks of a host: ``DELTACHAIN_SPOOL``, or one a user."""
    given = environment.get("DELTACHAIN_SPOOL", "")
    return Path(given) if given else Path(tempfile.gettempdir()) / f"deltachain-{os.getuid()}"


def _number(given: Mapping[str, str], name: str) -> float | None:
    if name not in given:
        return None
    try:
        number = float(given[name])
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"DELTACHAIN_{name} is {given[name]!r}, not a number")
    return number
