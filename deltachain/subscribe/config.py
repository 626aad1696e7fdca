"""How a subscriber behaves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deltachain.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscribeConfig:
    """Settings of a :class:`Subscriber`; the defaults suit most replicas.

    Raises:
        ConfigError: A value is none of those allowed.
    """

    url: str
    """Where the chain lies."""

    base: Path | None = None
    """Where the base checkpoint of the chain lies here, if it has one and the path differs."""

    stage_budget: int = 4 << 30
    """Bytes of staged and undo bits. What does not fit (an anchor of a large model) is decoded
    twice, once to prove it and once while it is written, and can not be taken back."""

    undo_applies: int = 2
    """Applies whose old bits are kept, so that ``rollback`` needs no store."""

    poll_s: float = 1.0
    """Seconds between looks for a new version; each is varied by a quarter, so that replicas that
    were started together do not ask together."""

    verify_at_start: bool = True
    """Recompute the state of a target that remembers what it holds, before believing it."""

    def __post_init__(self) -> None:
        if self.poll_s <= 0 or self.stage_budget < 0 or self.undo_applies < 0:
            raise ConfigError("poll_s must be positive, stage_budget and undo_applies not negative")
