"""Thread pool that runs work in the caller when no thread can be started.

``ThreadPoolExecutor`` raises ``RuntimeError`` in that case, and also at the interpreter's exit,
when a publisher commits its last version. A pool serves one call and ends with it: a global pool
would have no threads after a fork, and one hanging job would block the others.
"""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, Final, Protocol, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt


class Closeable(Protocol):
    def close(self) -> None:
        """Release all resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close()


# A fresh page costs more than what is written into it: with pages of 4 KiB, decoding a model took
# twice as long. numpy asks for large pages itself, but gets them only inside of large arrays.


NBYTES: Final = 1 << 25  # bytes of a piece of memory
SMALL: Final = 1 << 16  # bytes below which an array has memory of its own, as above NBYTES // 4

REUSES: Final = sys.version_info < (3, 14)
"""Whether references are counted as expected below: later Pythons borrow some."""

ALIGNMENT: Final = 64  # bytes that the start of an array is a multiple of, within its piece

_local = threading.local()


def empty(count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return a ``(count,)`` array with any content.

    It shares a piece of memory with other arrays that this thread asked for. A piece is released
    with the last of them; a thread keeps its newest one, and begins it anew once nobody uses it.
    """
    kind = np.dtype(dtype)
    nbytes = count * kind.itemsize
    if not SMALL <= nbytes <= NBYTES // 4:
        return np.empty(count, kind)
    piece: npt.NDArray[np.uint8] | None = getattr(_local, "piece", None)
    at: int = getattr(_local, "at", 0)
    if REUSES and piece is not None and sys.getrefcount(piece) == 3:  # here, _local, the argument
        at = 0
    if piece is None or at + nbytes > NBYTES:
        piece, at = np.empty(NBYTES, np.uint8), 0
    _local.piece, _local.at = piece, at + nbytes + -nbytes % ALIGNMENT
    found: npt.NDArray[Any] = piece[at : at + nbytes].view(kind)
    return found


_T = TypeVar("_T")
_A = TypeVar("_A")

_Job: TypeAlias = "tuple[Future[Any], Callable[[], Any]]"


def started(thread: Thread) -> bool:
    try:
        thread.start()
    except RuntimeError:  # "can't start new thread"; Python has no narrower class
        return False
    return True


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Pool:
    def __init__(self, most: int, name: str = "deltachain") -> None:
        self._most = most
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._starting = Lock()

    def submit(self, function: Callable[..., _T], *arguments: Any) -> Future[_T]:  # noqa: ANN401
        future: Future[_T] = Future()
        job = future, partial(function, *arguments)
        if self._has_thread():
            self._jobs.put(job)
        else:
            _do(*job)
        return future

    def map(self, function: Callable[..., _T], *arguments: Iterable[Any]) -> Iterator[_T]:
        futures = [self.submit(function, *each) for each in zip(*arguments, strict=False)]
        return (future.result() for future in futures)

    def ordered(
        self,
        function: Callable[[_A], _T],
        items: Iterable[_A],
        *,
        ahead: int,
        small: Callable[[_A], bool] = lambda _: False,
    ) -> Iterator[_T]:
        begun: deque[Callable[[], _T]] = deque()
        for item in items:
            mine = partial(function, item)
            begun.append(mine if small(item) else self.submit(mine).result)
            if len(begun) >= ahead:
                yield begun.popleft()()
        while begun:
            yield begun.popleft()()

    def shutdown(self) -> None:
        self._jobs.put(None)
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _has_thread(self) -> bool:
        with self._starting:
            if len(self._threads) < self._most:
                number = len(self._threads)
                thread = Thread(target=self._run, name=f"{self._name}_{number}", daemon=True)
                if started(thread):
                    self._threads.append(thread)
            return bool(self._threads)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            _do(*job)
            del job  # its arguments and result may be large
        self._jobs.put(None)  # for the next thread: one whose start was interrupted is in no list


def apart(work: Callable[[], _T], name: str) -> Future[_T] | None:
    """Return the future of work in a daemon thread of its own; ``None`` if none can be started."""
    future: Future[_T] = Future()
    future.set_running_or_notify_cancel()  # work that was begun is not cancelled
    thread = Thread(target=_settle, args=(future, work), name=name, daemon=True)
    return future if started(thread) else None


def _do(future: Future[Any], work: Callable[[], Any]) -> None:
    if future.set_running_or_notify_cancel():
        _settle(future, work)


def _settle(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        future.set_result(work())
    except BaseException as exc:  # noqa: BLE001 - raised again by Future.result
        future.set_exception(exc)
