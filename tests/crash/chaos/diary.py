"""The diary of a run: one JSON object a line, which survives whatever happens to the run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Any


class Diary:
    """Appends events to a file, from any thread, and reads those of all runs."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        before = path.read_bytes()
        if before and not before.endswith(b"\n"):
            self._append("\n")

    def note(self, event: str, **facts: Any) -> None:
        line = json.dumps({"time": round(time.time(), 3), "event": event, **facts})
        self._append(f"{line}\n")

    def _append(self, text: str) -> None:
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(text)

    def events(self, *names: str) -> Iterator[dict[str, Any]]:
        with self._path.open(encoding="utf-8") as file:
            for line in file:
                try:
                    found = json.loads(line)
                except ValueError:
                    continue
                if found["event"] in names:
                    yield found
