"""Processes at the places of a network, told what to do over pipes."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

from tests.bench.cross_region.network import CrossRegionError
from tests.bench.cross_region.plan import NetworkPlan

ROOT: Final = Path(__file__).resolve().parents[3]
STOP_S: Final = 10.0
FAILED_STOP_S: Final = 1.0
_TAIL: Final = 2000

Answer: TypeAlias = Mapping[str, Any]


class Process:
    def __init__(
        self,
        plan: NetworkPlan,
        place: str,
        role: str,
        order: Mapping[str, Any],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = f"{role} at {place}"
        self._log = log
        command = plan.inside(place, (sys.executable, "-m", "tests.bench.cross_region.roles", role))
        with log.open("ab") as errors:
            # In a session of its own: Ctrl-C is for the one who can take everything down in order.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
                start_new_session=True,
            )
        self._answers: queue.Queue[str] = queue.Queue()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        self.order(**order)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop(STOP_S if exc is None else FAILED_STOP_S)

    def order(self, **values: Any) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        with suppress(BrokenPipeError):  # its answer, which will not come, is missed by name
            pipe.write(json.dumps(values) + "\n")
            pipe.flush()

    def answer(self, timeout_s: float) -> Answer:
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise self._failed(f"said nothing for {timeout_s} s") from None
        if not line:
            raise self._failed("ended too early")
        found: Answer = json.loads(line)
        return found

    def _failed(self, what: str) -> CrossRegionError:
        tail = self._log.read_text(encoding="utf-8", errors="replace")[-_TAIL:].strip()
        return CrossRegionError(f"the {self.name} {what}\n{tail}")

    def stop(self, patience_s: float = STOP_S) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        for insist in (self._process.terminate, self._process.kill):
            try:
                self._process.wait(patience_s)
            except subprocess.TimeoutExpired:
                insist()
        self._process.wait()
        self._reading.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")
