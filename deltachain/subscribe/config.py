"""How a subscriber behaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    twice, once to prove it and once while it is written, and cannot be taken back."""

    undo_applies: int = 2
    """Applies whose old bits are kept, so that ``rollback`` needs no store."""

    poll_s: float | None = None
    """Seconds between looks for a new version; each is varied by a quarter, so that replicas that
    were started together do not ask together. Not given: what the store bears."""

    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What the library behind the store needs to know beyond the URL and the environment."""

    verify_at_start: bool = True
    """Recompute the state of a target that remembers what it holds, before believing it."""

    trust_remote_code: bool = False
    """Whether the chain's small files may name code in a repository (``auto_map``:
    ``repo--modeling.Class``), which whoever loads the folder so runs. Not given: they are written
    without, and a warning says so."""

    def __post_init__(self) -> None:
        polls = self.poll_s is None or self.poll_s > 0
        if not polls or self.stage_budget < 0 or self.undo_applies < 0:
            raise ConfigError("poll_s must be positive, stage_budget and undo_applies not negative")
