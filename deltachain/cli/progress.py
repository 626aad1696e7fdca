"""Progress bars on stderr; none if stderr is not a terminal."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar, cast

from rich import progress as bars

from deltachain.cli.console import err
from deltachain.store import Store

_READS: Final = ("get", "read", "get_range")  # return what they move
_WRITES: Final = ("put", "upload", "put_if_absent")  # move what follows the key

_T = TypeVar("_T")


def _progress(*columns: bars.ProgressColumn) -> bars.Progress:
    console, doing = err(), bars.TextColumn("{task.description}")
    shown = (doing, *columns, bars.TimeElapsedColumn())
    return bars.Progress(*shown, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def watching(store: Store, doing: str) -> Iterator[Store]:
    with _progress(bars.FileSizeColumn(), bars.TransferSpeedColumn()) as progress:
        task = progress.add_task(doing, total=None)
        yield cast(Store, _Metered(store, partial(progress.advance, task)))


@contextmanager
def moving(store: Store, doing: str) -> Iterator[tuple[Store, Callable[[int], None]]]:
    with _progress(bars.BarColumn(), bars.DownloadColumn(), bars.TransferSpeedColumn()) as progress:
        task, total = progress.add_task(doing, total=None), 0

        def planned(nbytes: int) -> None:
            nonlocal total
            total += nbytes
            progress.update(task, total=total)

        yield cast(Store, _Metered(store, partial(progress.advance, task))), planned


def counted(things: Iterable[_T], total: int, doing: str) -> Iterator[_T]:
    with _progress(bars.BarColumn(), bars.MofNCompleteColumn()) as progress:
        yield from progress.track(things, total=total, description=doing)


class _Metered:
    def __init__(self, store: Store, moved: Callable[[int], None]) -> None:
        self._store, self._moved = store, moved

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of the store
        plain = getattr(self._store, name)
        if name not in (*_READS, *_WRITES):
            return plain

        def metered(key: str, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
            found = plain(key, *arguments, **options)
            self._moved(len(found if name in _READS else arguments[0]))
            return found

        return metered
