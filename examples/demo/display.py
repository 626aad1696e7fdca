"""Console output of a running demo: a progress bar and log lines."""

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
    console: Console

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    @contextmanager
    def phase(self, title: str, total: int) -> Iterator[Bar]:
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
