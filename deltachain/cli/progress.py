"""Progress bars on stderr; none if stderr is not a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from rich import progress as bars

from deltachain.cli.console import err
from deltachain.store import Store
from deltachain.store.base import MAX_DOCUMENT
from deltachain.types import Buffer

_T = TypeVar("_T")


def _progress(*columns: bars.ProgressColumn) -> bars.Progress:
    console, doing = err(), bars.TextColumn("{task.description}")
    shown = (doing, *columns, bars.TimeElapsedColumn())
    return bars.Progress(*shown, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def watching(store: Store, doing: str) -> Iterator[Store]:
    with _progress(bars.FileSizeColumn(), bars.TransferSpeedColumn()) as progress:
        task = progress.add_task(doing, total=None)
        yield _metered(store, lambda nbytes: progress.advance(task, nbytes))


@contextmanager
def moving(store: Store, doing: str) -> Iterator[tuple[Store, Callable[[int], None]]]:
    with _progress(bars.BarColumn(), bars.DownloadColumn(), bars.TransferSpeedColumn()) as progress:
        task, total = progress.add_task(doing, total=None), 0

        def planned(nbytes: int) -> None:
            nonlocal total
            total += nbytes
            progress.update(task, total=total)

        yield _metered(store, lambda nbytes: progress.advance(task, nbytes)), planned


def counted(things: Iterable[_T], total: int, doing: str) -> Iterator[_T]:
    with _progress(bars.BarColumn(), bars.MofNCompleteColumn()) as progress:
        yield from progress.track(things, total=total, description=doing)


def _metered(store: Store, moved: Callable[[int], None]) -> Store:
    return cast(Store, _Metered(store, moved))


class _Metered:
    def __init__(self, store: Store, moved: Callable[[int], None]) -> None:
        self._store, self._moved = store, moved

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of the store
        return getattr(self._store, name)

    def get(self, key: str, *, limit: int = MAX_DOCUMENT) -> bytes:
        data = self._store.get(key, limit=limit)
        self._moved(len(data))
        return data

    def read(self, key: str, *, nbytes: int, pin: str = "") -> Buffer:
        data = self._store.read(key, nbytes=nbytes, pin=pin)
        self._moved(nbytes)
        return data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        data = self._store.get_range(key, start, length)
        self._moved(len(data))
        return data

    def put(self, key: str, data: Buffer) -> str:
        pin = self._store.put(key, data)
        self._moved(len(data))
        return pin

    def upload(self, key: str, data: Buffer) -> str:
        uploaded = self._store.upload(key, data)
        self._moved(len(data))
        return uploaded

    def put_if_absent(self, key: str, data: Buffer) -> None:
        self._store.put_if_absent(key, data)
        self._moved(len(data))
