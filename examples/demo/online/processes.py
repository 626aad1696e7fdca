"""Processes that are restarted when they die, like under a process supervisor."""

import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Final, Self

from examples.demo.follower_process import DemoError

STOP_S: Final = 15.0
LOOK_S: Final = 0.2
MOST_STARTS: Final = 5
PORTS: Final = range(10_000, 32_000)  # below the ephemeral ports of Linux, macOS and Windows


class Service:
    """A process with its children, restarted if it exits early."""

    def __init__(  # noqa: PLR0913 - settings of one process
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        *,
        forever: bool = True,
        most_starts: int = MOST_STARTS,
        heard: Callable[[str], None] | None = None,
    ) -> None:
        self.name, self.deaths = name, 0
        self._command, self._folder = list(command), folder
        self._environment = {**os.environ, **environment}
        self._forever, self._heard = forever, heard
        self._most_starts = most_starts
        self._process: subprocess.Popen[str] | None = None
        self._ending, self._ended = Event(), Event()
        self._thread = Thread(target=self._watch, name=f"watch-{name}", daemon=True)

    @property
    def log(self) -> Path:
        return self._folder / f"{self.name}.log"

    @property
    def restarts(self) -> bool:
        return self.deaths < self._most_starts

    @property
    def pid(self) -> int:
        return self._process.pid if self._process and self._process.poll() is None else 0

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._end(signal.SIGTERM)
        self._thread.join(2 * STOP_S)

    def wait(self, seconds: float) -> None:
        if not self._ended.wait(seconds) or self._process is None or self._process.returncode:
            raise self.failure(f"did not finish in {seconds:.0f} s")

    def failure(self, what: str) -> DemoError:
        tail = self.log.read_text(errors="replace").strip().splitlines()[-8:]
        return DemoError(f"the {self.name} {what}", hint="\n  ".join(tail))

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def _start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - commands of the demo
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
        if process.stdout is not None and self._heard is not None:
            with process.stdout as lines:
                for line in lines:
                    self._heard(line)

    def _watch(self) -> None:
        while self._process is not None:
            code = self._process.wait()
            if self._ending.is_set() or (code == 0 and not self._forever):
                break
            self.deaths += 1
            self._end(signal.SIGKILL)  # child processes, which engines have
            if not self.restarts:
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
    start = time.monotonic()
    while not ready():
        if time.monotonic() - start > seconds or not service.restarts:
            raise service.failure(f"was not ready in {seconds:.0f} s")
        time.sleep(LOOK_S)
    return time.monotonic() - start


def free_port() -> int:
    """Return a free TCP port that the system does not give to connections of others."""
    while True:
        port = secrets.choice(PORTS)
        with suppress(OSError), socket.socket() as found:
            found.bind(("127.0.0.1", port))
            return port
