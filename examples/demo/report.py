"""Report of the demo, as tables and as JSON."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainFigures:
    """Measurements of the chain that a demo published."""

    versions: int
    mismatching_bits: int
    bytes_sent: int
    anchor_bytes: int
    bytes_dense: int
    late_joiner_bytes: int
    late_joiner_plan: str
    verified: bool
    seconds: float
    parameters: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Display:
    console: Console

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    @contextmanager
    def phase(self, title: str, total: int) -> "Iterator[Bar]":
        columns = (
            TextColumn("[bold]{task.description:<10}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[note]}"),
        )
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task(title, total=total, note="")
            yield Bar(progress, task)


@dataclass(frozen=True, slots=True)
class Bar:
    _progress: Progress
    _task: TaskID

    def at(self, completed: int, note: str = "") -> None:
        self._progress.update(self._task, completed=completed, note=note)

    def say(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRow:
    version: int
    step: int | None
    density: float
    nbytes: int
    requests: int
    ratio: float
    stage_ms: float
    swap_ms: float
    lag_versions: int
    staleness_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BitCheck:
    what: str
    elements: int
    mismatching_bits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport(ChainFigures):
    rows: tuple[VersionRow, ...]
    judged: tuple[BitCheck, ...]
    texts: dict[str, str]

    def print(self, console: Console) -> None:
        console.print(self._versions())
        console.print(self._judged())
        ratio = self.bytes_dense / max(1, self.bytes_sent + self.anchor_bytes)
        equal = self.mismatching_bits == 0
        color = "green" if equal and self.verified else "red"
        checked = "chain verified" if self.verified else "chain NOT verified"
        console.print(
            f"{self.versions} versions of {self.parameters:,} parameters, "
            f"{self.bytes_sent:,} B of deltas + {self.anchor_bytes:,} B of anchors; "
            f"full copies: {self.bytes_dense:,} B ({ratio:.0f}x){self._requests()}. "
            f"A newcomer fetched {self.late_joiner_bytes:,} B.",
            highlight=False,
            soft_wrap=True,
        )
        console.print(
            f"[bold {color}]{self.mismatching_bits:,} mismatching bits, {checked}[/], "
            f"{self.seconds:.0f} s",
            highlight=False,
        )

    def _requests(self) -> str:
        total = sum(row.requests for row in self.rows)
        return f", {total / len(self.rows):.1f} requests a version" if total else ""

    def _versions(self) -> Table:
        table = Table(
            title="Every version, trainer to follower",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            padding=(0, 1, 0, 0),  # 80 columns are enough
        )
        columns = ("version", "step", "density", "bytes", "ratio", "stage ms", "swap ms", "lag")
        for name in (*columns, "age s"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(
                str(row.version),
                "-" if row.step is None else str(row.step),
                f"{row.density:.2%}",
                f"{row.nbytes:,}",
                f"{row.ratio:.0f}x",
                f"{row.stage_ms:.1f}",
                f"{row.swap_ms:.2f}",
                str(row.lag_versions),
                f"{row.staleness_s:.2f}",
            )
        return table

    def _judged(self) -> Table:
        title = "Independent comparison: bits of the trainer and of the followers"
        table = Table(title=title, box=box.SIMPLE_HEAD)
        table.add_column("compared")
        table.add_column("elements", justify="right")
        table.add_column("mismatching bits", justify="right")
        for judged in self.judged:
            table.add_row(judged.what, f"{judged.elements:,}", f"{judged.mismatching_bits:,}")
        return table
