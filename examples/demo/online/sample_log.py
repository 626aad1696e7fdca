"""Analysis of a run's sample log, a JSON object a line for each sample."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """Mean rewards at the begin and the end of a run."""

    first: float
    last: float
    error: float


def staleness_of(diary: Path) -> list[int]:
    """Return, for each sampled token, the versions behind the newest at the end of its game."""
    found: list[int] = []
    for sample_of in _lines(diary):
        for version, count in sample_of["versions"]:
            found += [max(0, sample_of["held"] - version)] * count
    return found


def unknown_in(diary: Path) -> int:
    """Count tokens with an impossible version label.

    Such a version did not exist at the end of the game, or is older than an earlier token's.
    """
    found = 0
    for sample_of in _lines(diary):
        newest = 0
        for version, count in sample_of["versions"]:
            if not newest <= version <= sample_of["held"]:
                found += count
            newest = max(newest, version)
    return found


def rewards_of(diary: Path, share: float = 0.2) -> Rewards:
    lines = _lines(diary)
    count = max(1, int(share * len(lines)))
    (first, first_error), (last, last_error) = map(_mean, (lines[:count], lines[-count:]))
    return Rewards(first=first, last=last, error=math.hypot(first_error, last_error))


def _mean(lines: list[dict[str, Any]]) -> tuple[float, float]:
    groups: dict[int, list[float]] = {}
    for line in lines:
        groups.setdefault(line["group"], []).append(line["reward"])
    means = [statistics.mean(rewards) for rewards in groups.values()]
    error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.inf
    return statistics.mean(line["reward"] for line in lines), error


def _lines(diary: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in diary.read_text(encoding="utf-8").splitlines()]
