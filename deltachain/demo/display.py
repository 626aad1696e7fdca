"""What the demo shows while it runs: one line that moves, and lines that stay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)


@dataclass(frozen=True, slots=True)
class Display:
    """A console, and how to say things on it.

    Attributes:
        console: Standard output, or standard error when that is for JSON.
    """

    console: Console

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, highlight=False, soft_wrap=True)

    @contextmanager
    def phase(self, title: str, total: int) -> Iterator[Bar]:
        """A titled part of the demo with a bar of ``total`` steps."""
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
    """The line that moves."""

    _progress: Progress
    _task: TaskID

    def at(self, completed: int, note: str = "") -> None:
        """Move it."""
        self._progress.update(self._task, completed=completed, note=note)

    def say(self, text: str) -> None:
        """A line that stays, above it."""
        self._progress.console.print(text, highlight=False, soft_wrap=True)
