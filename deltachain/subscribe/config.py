"""Settings of a subscriber."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deltachain.chain.trust import Trust
from deltachain.setting_types import AtLeastZero, Positive, check_kinds
from deltachain.store import Location, location_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscribeConfig:
    """Settings of a :class:`Subscriber`; the defaults suit most replicas.

    Raises:
        ConfigError: A value is of another type than its field, or out of range.

    Examples:
        >>> config = deltachain.SubscribeConfig(url=url, poll_s=5)
        >>> subscriber = deltachain.Subscriber(config, weights)
    """

    url: str
    """URL of the chain."""

    base: Path | None = None
    """Local folder of the chain's base checkpoint; a path that the store names is never opened."""

    stage_budget: AtLeastZero = 4 << 30
    """Limit of staged and undo bits, in bytes. A larger update (an anchor of a large model) is
    decoded twice, once for verification and once while it is written, and cannot be undone."""

    undo_applies: AtLeastZero = 2
    """Number of applies whose old bits are kept for a ``rollback`` without the store."""

    poll_s: Positive | None = None
    """Seconds between polls for a new version, with a jitter of 25 % to spread replicas that start
    together. ``None``: the default of the store."""

    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Options of the library behind the store, beyond URL and environment."""

    verify_at_start: bool = True
    """Verify the state digest of a target that records its version (a folder) when it is opened."""

    trusted_keys: str | None = None
    """Public keys as ``deltachain keygen`` prints them, with commas between them, or a file with
    one a line; ``None``: those in ``DELTACHAIN_TRUSTED_KEYS``, if any. With trusted keys only what
    one of them signed is applied."""

    max_heartbeat_age_s: float | None = None
    """Largest age of the publisher's last sign, its newest version or heartbeat, in seconds; beyond
    it the store may withhold versions, and none is applied. Needs trusted keys. ``None``: as in
    ``DELTACHAIN_MAX_HEARTBEAT_AGE_S``, if set."""

    mirror: bool | None = None
    """Whether the URL is a mirror: a held version that it does not have is then waited for, and is
    no sign of a store that went back. ``None``: as in ``DELTACHAIN_MIRROR``, else not."""

    trust_remote_code: bool = False
    """Keep references to remote code in assets (``auto_map``: ``repo--modeling.Class``), which run
    when the folder is loaded. By default they are removed with a warning."""

    def trust(self) -> Trust:
        """Return the trusted keys, the largest age, and whether the URL is a mirror.

        Raises:
            ConfigError: A key is invalid, or an age is given without trusted keys.
        """
        return Trust.of_reader(self.trusted_keys, self.max_heartbeat_age_s, mirror=self.mirror)

    @classmethod
    def of(cls, config: "SubscribeConfig | Location") -> "SubscribeConfig":
        """Return settings, also for a URL or a folder alone."""
        return config if isinstance(config, cls) else cls(url=location_of(config))

    def __post_init__(self) -> None:
        base: Any = self.base
        if isinstance(base, str):
            object.__setattr__(self, "base", Path(base).expanduser())
        if isinstance(self.url, os.PathLike):
            object.__setattr__(self, "url", os.fspath(self.url))
        check_kinds(self)
