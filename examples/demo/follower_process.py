"""Control of the follower process by the demo."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final

from deltachain.errors import DeltaChainError

TIMEOUT_S: Final = 60.0
CLONE: Final = str(Path(__file__).parents[2])


class DemoError(DeltaChainError):
    pass


class FollowerProcess:
    """Starts ``examples.demo.follower`` and collects its output."""

    def __init__(
        self,
        url: str,
        checkpoint: Path,
        out: Path,
        save_steps: Sequence[int],
        heard: Callable[[dict[str, Any]], None],
    ) -> None:
        self.lines: list[dict[str, Any]] = []
        self._heard = heard
        self._errors = out.with_suffix(".log")
        command = [sys.executable, "-m", "examples.demo.follower", url, checkpoint, out]
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter and own module
                [*map(str, command), "--save-steps", *map(str, save_steps)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": CLONE},
            )
        self._ready = Event()
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_until_ready(self) -> None:
        if not self._ready.wait(TIMEOUT_S):
            raise self._failure(f"did not start in {TIMEOUT_S:.0f} s")
        if not self.lines:
            raise self._failure("did not start")

    def finish(self, *, last: int, back_to: int) -> None:
        pipe = self._process.stdin
        if pipe is None or self._process.poll() is not None:
            raise self._failure("ended before training did")
        pipe.write(json.dumps({"last": last, "back_to": back_to}) + "\n")
        pipe.flush()
        try:
            code = self._process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired as exc:
            raise self._failure(f"did not reach version {last} in {TIMEOUT_S:.0f} s") from exc
        self._reader.join()
        if code != 0:
            raise self._failure(f"exited with {code}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            event = json.loads(line)
            self.lines.append(event)
            self._ready.set()
            self._heard(event)
        self._ready.set()  # also after an exit without output, to unblock the waiter

    def _failure(self, what: str) -> DemoError:
        tail = self._errors.read_text(errors="replace").strip().splitlines()[-5:]
        return DemoError(f"the follower process {what}", hint="\n  ".join(tail))
