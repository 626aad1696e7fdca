"""Settings of a replica, read from environment variables; see :mod:`deltachain.environment`.

The engine starts all processes, so their environment is their only shared configuration.
"""

import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from deltachain.environment import is_strict, read, read_secret
from deltachain.errors import ConfigError
from deltachain.store import Location, check_apart
from deltachain.subscribe.config import SubscribeConfig


def spool_folder(environment: Mapping[str, str]) -> Path:
    given = environment.get("DELTACHAIN_SPOOL", "")
    return Path(given) if given else Path(tempfile.gettempdir()) / f"deltachain-{os.getuid()}"


def proofs_folder(environment: Mapping[str, str]) -> Path | None:
    """Return the folder of kept proofs, by default beside the spools; ``None`` if it is off."""
    given = environment.get("DELTACHAIN_PROOFS", "")
    if given == "off":
        return None
    return Path(given) if given else spool_folder(environment) / "proofs"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    spool: Path  # the only folder from which plans are read
    url: str = ""  # the only chain that the rank accepts; empty for any
    decode: str = ""  # where changes are decoded; empty for where the weights are
    proofs: Path | None = None  # folder of kept proofs; none are kept without one

    @classmethod
    def of(cls, environment: Mapping[str, str], *, draft: bool = False) -> "RankSettings":
        """Read the settings from environment variables, without any validation in workers."""
        return cls(
            spool=spool_folder(environment),
            url=environment.get("DELTACHAIN_DRAFT_URL" if draft else "DELTACHAIN_URL", ""),
            decode=environment.get("DELTACHAIN_DECODE", ""),
            proofs=proofs_folder(environment),
        )


def draft_does(environment: Mapping[str, str], *, has_heads: bool) -> str:
    """Return what a draft follows; ``has_heads`` says that it is heads in the model's chain."""
    if has_heads:
        return "follows the chain"
    has_chain = bool(environment.get("DELTACHAIN_DRAFT_URL"))
    return "follows its own chain" if has_chain else "keeps its weights"


_OWN: Final = ("FOLLOW", "PAUSE", "MAX_LAG", "MAX_SILENCE_S", "TOGETHER", "DRAFT_URL")

_SUBSCRIBER: Final = [field.name.upper() for field in fields(SubscribeConfig)]
"""Variables that set fields of the subscriber."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """Settings of a replica; :data:`deltachain.environment.VARIABLES` describes each."""

    subscribe: SubscribeConfig
    follow: bool = False
    strict: bool = True
    pause: str = ""
    token: str | Path = field(default="", repr=False)
    max_lag: int | None = None
    max_silence_s: float | None = None
    spool: Path = field(default_factory=lambda: spool_folder({}))
    presence: str = ""  # URL
    together: tuple[str, int] | None = None  # group and its number of replicas
    draft_url: str = ""  # chain of the draft; empty if it keeps its weights, or has none

    @classmethod
    def in_process(
        cls, config: SubscribeConfig | Location, environment: Mapping[str, str]
    ) -> "ReplicaSettings":
        """Return the settings of an engine that a program holds, which names the chain itself."""
        own = _given(read(environment), ("PAUSE", "DRAFT_URL"))
        spool = spool_folder(environment)
        return cls(subscribe=SubscribeConfig.of(config), follow=True, spool=spool, **own)

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "ReplicaSettings | None":
        """Read the settings from environment variables; ``None`` without ``DELTACHAIN_URL``."""
        given = read(environment)
        if "URL" not in given:
            return None
        presence = given.get("PRESENCE_URL", "")
        if presence:
            check_apart(presence, given["URL"])
        elif "TOGETHER" in given:
            raise ConfigError(
                "DELTACHAIN_TOGETHER is set, but no place at which replicas meet",
                hint="set DELTACHAIN_PRESENCE_URL, the same for all of them",
            )
        return cls(
            subscribe=SubscribeConfig(**_given(given, _SUBSCRIBER)),
            strict=is_strict(environment),
            token=read_secret(environment, "TOKEN"),
            spool=spool_folder(environment),
            presence=presence,
            **_given(given, _OWN),
        )


def _given(given: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name.lower(): given[name] for name in names if name in given}
