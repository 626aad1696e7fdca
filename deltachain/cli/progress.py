"""Progress bars on stderr; none if stderr is not a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from rich.progress import (
    BarColumn,
    DownloadColumn,
    FileSizeColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from typing_extensions import override

from deltachain.cli.console import err
from deltachain.store import Capabilities, ObjectInfo, Store
from deltachain.store.base import MAX_DOCUMENT
from deltachain.types import Buffer

_T = TypeVar("_T")


@contextmanager
def watching(store: Store, doing: str) -> Iterator[Store]:
    """Yield a store whose traffic is shown as a progress bar."""
    console = err()
    columns = (
        SpinnerColumn(style="cyan"),
        TextColumn("{task.description}"),
        FileSizeColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(doing, total=None)
        yield MeteredStore(store, lambda nbytes: progress.advance(task, nbytes))


@contextmanager
def moving(store: Store, doing: str) -> Iterator[tuple[Store, Callable[[int], None]]]:
    """Yield a store whose traffic is shown, and a function that adds bytes to the total."""
    console = err()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=32, complete_style="cyan", finished_style="cyan"),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task, total = progress.add_task(doing, total=None), 0

        def planned(nbytes: int) -> None:
            nonlocal total
            total += nbytes
            progress.update(task, total=total)

        yield MeteredStore(store, lambda nbytes: progress.advance(task, nbytes)), planned


def counted(things: Iterable[_T], total: int, doing: str) -> Iterator[_T]:
    """Yield ``things`` and show how many of ``total`` are done."""
    console = err()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=32, complete_style="cyan", finished_style="cyan"),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(doing, total=total)
        for thing in things:
            progress.advance(task)
            yield thing


class MeteredStore(Store):
    """Store wrapper that reports the size of every object it reads or writes.

    Args:
        store: The wrapped store.
        moved: Called with the size of each object in bytes, from any thread.
    """

    def __init__(self, store: Store, moved: Callable[[int], None]) -> None:
        self._store = store
        self._moved = moved

    @property
    @override
    def url(self) -> str:
        return self._store.url

    @property
    @override
    def capabilities(self) -> Capabilities:
        return self._store.capabilities

    @property
    @override
    def requests(self) -> int:
        return self._store.requests

    @override
    def get(self, key: str, *, limit: int = MAX_DOCUMENT) -> bytes:
        data = self._store.get(key, limit=limit)
        self._moved(len(data))
        return data

    @override
    def read(self, key: str, *, nbytes: int, pin: str = "") -> Buffer:
        data = self._store.read(key, nbytes=nbytes, pin=pin)
        self._moved(nbytes)
        return data

    @override
    def get_range(self, key: str, start: int, length: int) -> bytes:
        data = self._store.get_range(key, start, length)
        self._moved(len(data))
        return data

    @override
    def put(self, key: str, data: Buffer) -> str:
        pin = self._store.put(key, data)
        self._moved(len(data))
        return pin

    @override
    def put_if_absent(self, key: str, data: Buffer) -> None:
        self._store.put_if_absent(key, data)
        self._moved(len(data))

    @override
    def find(self, key: str) -> ObjectInfo | None:
        return self._store.find(key)

    @override
    def find_all(self, keys: Iterable[str]) -> Mapping[str, ObjectInfo]:
        return self._store.find_all(keys)

    @override
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._store.list(prefix)

    @override
    def delete(self, key: str) -> None:
        self._store.delete(key)

    @override
    def clock(self) -> float | None:
        return self._store.clock()

    @override
    def close(self) -> None:
        self._store.close()
