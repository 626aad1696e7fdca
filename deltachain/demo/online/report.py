"""What the asynchronous demo found, as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineReport:
    """Everything that was measured.

    Attributes:
        engine: Which engine.
        versions: Of the chain, the first included.
        mismatching_bits: Between the trainer's last weights and the chain's, by the oracle.
        replica_agrees: Whether the replica, which read its live weights anew, has the state of the
            trainer's last version.
        bytes_sent: All deltas.
        anchor_bytes: All anchors.
        bytes_dense: What full bf16 copies of the same versions would have been.
        late_joiner_bytes: What a newcomer fetched at the end.
        late_joiner_plan: How.
        verified: Whether ``deltachain verify`` found everything right.
        seconds: Altogether.
        parameters: Of the model.
        samples: Games that were handed to the trainer.
        tokens: That the policy drew in them.
        unknown_versions: Of these, those whose version was not there, or older than one before.
        reward_first: Mean over the first fifth of the samples.
        reward_last: Over the last fifth.
        reward_error: Standard error of their difference.
        staleness_p50: Versions that half of the tokens were behind when their game ended.
        staleness_max: And the most.
        pause_ms_p50: Milliseconds that the engine paused for a version.
        pause_ms_max: And the most.
        sync_s_p50: Seconds that training was held for a version.
        deaths: Processes that had to be started again, by name.
    """

    engine: str
    versions: int
    mismatching_bits: int
    replica_agrees: bool
    bytes_sent: int
    anchor_bytes: int
    bytes_dense: int
    late_joiner_bytes: int
    late_joiner_plan: str
    verified: bool
    seconds: float
    parameters: int
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
        """Whether trainer, chain, replica and samples agree, and something was learnt."""
        agree = self.verified and self.replica_agrees
        return agree and not self.mismatching_bits and not self.unknown_versions and self.learnt

    @property
    def learnt(self) -> bool:
        """Whether the reward rose; ``reward_error`` tells how surely."""
        return self.reward_last > self.reward_first

    def as_json(self) -> dict[str, Any]:
        """One JSON object."""
        return asdict(self)

    def print(self, console: Console) -> None:
        """A table for people."""
        table = Table(box=box.SIMPLE_HEAD, show_header=False, title="Trainer, bucket, replica")
        table.add_column(style="dim")
        table.add_column(justify="right")
        dense = self.bytes_dense / max(1, self.bytes_sent + self.anchor_bytes)
        again = ", ".join(f"{name} {count}x" for name, count in self.deaths.items() if count)
        rows = {
            "reward, first and last fifth": f"{self.reward_first:.3f} to {self.reward_last:.3f}",
            "  rose by": f"{self.reward_last - self.reward_first:.3f} ± {self.reward_error:.3f}",
            "games, tokens drawn": f"{self.samples:,}, {self.tokens:,}",
            "tokens of no known version": f"{self.unknown_versions}",
            "versions a token was behind": f"{self.staleness_p50:g}, at most {self.staleness_max}",
            "pause of the engine": f"{self.pause_ms_p50:.0f} ms, at most {self.pause_ms_max:.0f}",
            "training held for a version": f"{self.sync_s_p50:.2f} s",
            "deltas and anchors": f"{self.bytes_sent:,} B + {self.anchor_bytes:,} B",
            "full copies would be": f"{self.bytes_dense:,} B, {dense:.0f}x",
            "a newcomer fetched": f"{self.late_joiner_bytes:,} B",
            "mismatching bits": f"{self.mismatching_bits}",
            "replica's live weights": "the trainer's" if self.replica_agrees else "OTHERS",
            "chain": "verified" if self.verified else "BROKEN",
            "started again": again or "nobody",
        }
        for name, value in rows.items():
            table.add_row(name, value)
        console.print(table)
        console.print(
            f"{self.versions} versions, {self.parameters:,} parameters, {self.seconds:.0f} s"
        )
