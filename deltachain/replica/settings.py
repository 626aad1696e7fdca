"""Settings of a replica, which its front ends read from :mod:`deltachain.environment`.

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


def spool_folder(environment: Mapping[str, str]) -> Path:
    """The folder that the leader and all ranks share: ``DELTACHAIN_SPOOL``, or one per user."""
    given = environment.get("DELTACHAIN_SPOOL", "")
    return Path(given) if given else default_spool()


def default_spool() -> Path:
    """A folder of this user among the temporary files."""
    return Path(tempfile.gettempdir()) / f"deltachain-{os.getuid()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """Settings of one rank.

    Attributes:
        spool: ``SPOOL``: the only folder that plans are read from.
        url: ``URL``: the only chain that the rank follows; empty for any.
    """

    spool: Path
    url: str = ""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> RankSettings:
        """Read the settings from environment variables; a worker refuses none."""
        return cls(spool=spool_folder(environment), url=environment.get("DELTACHAIN_URL", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """Settings of a replica; each is an environment variable, ``DELTACHAIN_`` and its name.

    Attributes:
        subscribe: ``URL``, and ``BASE``, ``POLL_S``, ``STAGE_BUDGET`` where given.
        follow: ``FOLLOW``: whether it applies versions as they are committed.
        strict: ``STRICT``: whether a server that cannot follow exits at startup.
        pause: ``PAUSE``: the engine's pause mode, which decides what happens to running requests.
        keep_cache: ``KEEP_CACHE``: whether cached prefixes outlive a swap.
        token: ``TOKEN``: the bearer token of the control routes; empty for none.
        max_lag: ``MAX_LAG``: versions behind the newest one seen up to which the replica is ready.
        spool: ``SPOOL``: a folder that the leader and all ranks share.
    """

    subscribe: SubscribeConfig
    follow: bool = False
    strict: bool = True
    pause: str = ""
    keep_cache: bool = False
    token: str = field(default="", repr=False)
    max_lag: int | None = None
    spool: Path = field(default_factory=default_spool)

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> ReplicaSettings | None:
        """Read the settings from environment variables; ``None`` without ``DELTACHAIN_URL``.

        Raises:
            ConfigError: A ``DELTACHAIN_*`` variable is unknown, or its value is invalid.
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
            spool=spool_folder(environment),
        )
