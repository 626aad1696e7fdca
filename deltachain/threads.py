"""Threads beside the caller's, as many as there are: without any, the caller does the work.

``ThreadPoolExecutor`` raises what is no error of ours when no thread can be started, with the work
still in its queue. Pools are made for one purpose and end with it: one that is kept would be empty
after a fork, and who hangs in it would keep others waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, Self, TypeAlias, TypeVar

_T = TypeVar("_T")

_Job: TypeAlias = "tuple[Future[Any], Callable[[], Any]]"


def started(thread: Thread) -> bool:
    """Start a thread, and say whether there was one left."""
    try:
        thread.start()
    except RuntimeError:  # all that Python says of it
        return False
    return True


class Pool:
    """Up to so many threads, started as work is handed over, and joined at the end.

    Args:
        most: Threads at a time.
        name: What they are called.
    """

    def __init__(self, most: int, name: str = "deltachain") -> None:
        self._most = most
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._starting = Lock()

    def submit(self, function: Callable[..., _T], *arguments: Any) -> Future[_T]:  # noqa: ANN401
        """Have a function called; where there is no thread for it, here and now."""
        future: Future[_T] = Future()
        job = future, partial(function, *arguments)
        if self._has_thread():
            self._jobs.put(job)
        else:
            _do(*job)
        return future

    def map(self, function: Callable[..., _T], *arguments: Iterable[Any]) -> Iterator[_T]:
        """Results in the order of the arguments; all work is handed over at once."""
        futures = [self.submit(function, *each) for each in zip(*arguments, strict=False)]
        return (future.result() for future in futures)

    def shutdown(self) -> None:
        """Wait until all work is done, and end the threads; again is allowed."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._jobs.put(None)
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
            del job  # what it holds on to may be large


def _do(future: Future[Any], work: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as exc:  # noqa: BLE001 - whoever asks for the result gets it
        future.set_exception(exc)
