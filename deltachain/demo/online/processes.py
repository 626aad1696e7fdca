"""Processes that are started again when they die, as whatever runs them in earnest would."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import Final, Self

from deltachain.demo.replica import DemoError

STOP_S: Final = 15.0
LOOK_S: Final = 0.2
MOST_STARTS: Final = 5


class Service:
    """One process, with its children; started again if it ends before it should.

    Args:
        name: For people.
        command: What starts it.
        folder: Gets its log.
        environment: Variables on top of this process's.
        forever: Whether it should never end by itself; else an exit with 0 is the end.
        heard: Told every line that it prints, in a thread; its log gets all of it otherwise.

    Attributes:
        deaths: How often it died.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        *,
        forever: bool = True,
        heard: Callable[[str], None] | None = None,
    ) -> None:
        self.name, self.deaths = name, 0
        self._command, self._folder = list(command), folder
        self._environment = {**os.environ, **environment}
        self._forever, self._heard = forever, heard
        self._process: subprocess.Popen[str] | None = None
        self._ending, self._ended = Event(), Event()
        self._thread = Thread(target=self._watch, name=f"watch-{name}", daemon=True)

    @property
    def log(self) -> Path:
        """What it wrote."""
        return self._folder / f"{self.name}.log"

    @property
    def pid(self) -> int:
        """Of its first process; 0 while none runs."""
        return self._process.pid if self._process and self._process.poll() is None else 0

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._start()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ending.set()
        self._end(signal.SIGTERM)
        self._thread.join(2 * STOP_S)

    def wait(self, seconds: float) -> None:
        """Wait until it has done its work.

        Raises:
            DemoError: It did not, in time or at all.
        """
        if not self._ended.wait(seconds) or self._process is None or self._process.returncode:
            raise self.failure(f"did not come to its end in {seconds:.0f} s")

    def failure(self, what: str) -> DemoError:
        """An error with the end of its log."""
        tail = self.log.read_text(errors="replace").strip().splitlines()[-8:]
        return DemoError(f"the {self.name} {what}", hint="\n  ".join(tail))

    def kill(self) -> None:
        """End it as a power cut would; it is then started again."""
        self._end(signal.SIGKILL)

    def _start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own commands
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if self._heard else log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
                text=True,
            )
        if self._heard is not None:
            Thread(target=self._listen, args=(self._process,), daemon=True).start()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            if self._heard is not None:
                self._heard(line)

    def _watch(self) -> None:
        while self._process is not None:
            code = self._process.wait()
            if self._ending.is_set() or (code == 0 and not self._forever):
                break
            self.deaths += 1
            self._end(signal.SIGKILL)  # its children: an engine has some
            if self.deaths >= MOST_STARTS:
                break
            self._start()
        self._ended.set()

    def _end(self, how: signal.Signals) -> None:
        process = self._process
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        if how is not signal.SIGKILL:
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def until(ready: Callable[[], bool], service: Service, seconds: float) -> float:
    """Wait until a service is ready; the seconds that took.

    Raises:
        DemoError: It is not, in time.
    """
    start = time.monotonic()
    while not ready():
        if time.monotonic() - start > seconds or service.deaths >= MOST_STARTS:
            raise service.failure(f"was not ready in {seconds:.0f} s")
        time.sleep(LOOK_S)
    return time.monotonic() - start


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
