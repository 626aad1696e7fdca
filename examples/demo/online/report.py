"""Report of the asynchronous demo, as a table and as JSON."""

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from examples.demo.report import ChainFigures


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


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineReport(ChainFigures):
    engine: str
    replica_agrees: bool
    samples: int
    tokens: int
    unknown_versions: int
    reward_first: float
    reward_last: float
    reward_error: float
    staleness_p50: float
    staleness_max: int
    pause_ms_p50: float
    pause_ms_max: float
    sync_s_p50: float
    deaths: dict[str, int]

    @property
    def fine(self) -> bool:
        agree = self.verified and self.replica_agrees
        return agree and not self.mismatching_bits and not self.unknown_versions and self.learnt

    @property
    def learnt(self) -> bool:
        return self.reward_last > self.reward_first

    def print(self, console: Console) -> None:
        table = Table(box=box.SIMPLE_HEAD, show_header=False, title="Trainer, bucket, replica")
        table.add_column(style="dim")
        table.add_column(justify="right")
        dense = self.bytes_dense / max(1, self.bytes_sent + self.anchor_bytes)
        again = ", ".join(f"{name} {count}x" for name, count in self.deaths.items() if count)
        rows = {
            "reward, first and last fifth": f"{self.reward_first:.3f} to {self.reward_last:.3f}",
            "  rose by": f"{self.reward_last - self.reward_first:.3f} ± {self.reward_error:.3f}",
            "games, sampled tokens": f"{self.samples:,}, {self.tokens:,}",
            "tokens of unknown version": f"{self.unknown_versions}",
            "versions a token was behind": f"{self.staleness_p50:g}, at most {self.staleness_max}",
            "pause of the engine": f"{self.pause_ms_p50:.0f} ms, at most {self.pause_ms_max:.0f}",
            "training blocked for a version": f"{self.sync_s_p50:.2f} s",
            "deltas and anchors": f"{self.bytes_sent:,} B + {self.anchor_bytes:,} B",
            "full copies would be": f"{self.bytes_dense:,} B, {dense:.0f}x",
            "a late joiner fetched": f"{self.late_joiner_bytes:,} B",
            "mismatching bits": f"{self.mismatching_bits}",
            "replica's live weights": "equal" if self.replica_agrees else "DIFFERENT",
            "chain": "verified" if self.verified else "BROKEN",
            "restarted": again or "none",
        }
        for name, value in rows.items():
            table.add_row(name, value)
        console.print(table)
        console.print(
            f"{self.versions} versions, {self.parameters:,} parameters, {self.seconds:.0f} s"
        )
