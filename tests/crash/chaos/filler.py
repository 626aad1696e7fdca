"""A disk that is full, and stays so while the engine deletes its own files there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Final

CHUNK: Final = bytes(1 << 12)
LOOK_S: Final = 0.02
"""Seconds between two looks for room: a spool that is deleted leaves enough for the next one."""


class Filler:
    """Takes all room on a disk, and what becomes free there, until it is told to end."""

    def __init__(self, disk: Callable[[], Path]) -> None:
        self._disk = disk
        self._over = Event()
        self._thread = Thread(target=self._stay_full, name="filler")

    def begin(self) -> bool:
        if not self._fill():
            return False
        self._thread.start()
        return True

    def end(self) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._file.unlink(missing_ok=True)

    @property
    def _file(self) -> Path:
        return self._disk() / "filler"

    def _stay_full(self) -> None:
        while not self._over.wait(LOOK_S):
            self._fill()

    def _fill(self) -> bool:
        with suppress(OSError), self._file.open("ab", buffering=0) as file:
            while file.write(CHUNK) == len(CHUNK):
                pass
        return self._file.exists()
