"""The follower process, from the demo's side."""

from __future__ import annotations

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


class DemoError(DeltaChainError):
    """The demo itself could not go on."""


class FollowerProcess:
    """Starts ``deltachain.demo.follower`` and collects what it prints.

    Args:
        url: The chain; it need not exist yet.
        checkpoint: What the replica starts from.
        out: Where it saves what it holds.
        save_steps: After which trainer steps.
        heard: Called with every line, in a thread.

    Attributes:
        lines: Everything it printed so far.
    """

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
        command = [sys.executable, "-m", "deltachain.demo.follower", url, checkpoint, out]
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(  # noqa: S603 - this very interpreter, our own module
                [*map(str, command), "--save-steps", *map(str, save_steps)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        self._ready = Event()
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_until_ready(self) -> None:
        """Wait until it has loaded its checkpoint and looks for the chain.

        Raises:
            DemoError: It ended, or does not come up.
        """
        if not self._ready.wait(TIMEOUT_S):
            raise self._failure(f"did not come up in {TIMEOUT_S:.0f} s")
        if not self.lines:
            raise self._failure("did not start")

    def finish(self, *, last: int, back_to: int) -> None:
        """Tell it where the chain ends, and wait until it has followed and rolled back.

        Raises:
            DemoError: It ended badly, or does not end.
        """
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
        """End it, however far it is, and let go of its pipes."""
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
        self._ready.set()  # also when it ends without a word: nobody should wait for it

    def _failure(self, what: str) -> DemoError:
        tail = self._errors.read_text(errors="replace").strip().splitlines()[-5:]
        return DemoError(f"the follower process {what}", hint="\n  ".join(tail))
