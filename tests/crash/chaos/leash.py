"""Ends the processes of a run, and those that these started, when the run itself is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

MARK: Final = "CHAOS_RUN"

_PROGRAM: Final = """
import os, signal, sys
sys.stdin.read()
wanted = sys.argv[1].encode()
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            if wanted in file.read().split(b"\\0"):
                os.kill(int(pid), signal.SIGKILL)
    except OSError:
        pass  # it has ended, or is another user's
"""


@contextmanager
def leash(name: str) -> Iterator[None]:
    """Mark all processes that are started inside; none outlives this one, however it ends."""
    environment = {key: value for key, value in os.environ.items() if key != MARK}
    command = [sys.executable, "-S", "-c", _PROGRAM, f"{MARK}={name}"]
    before = os.environ.get(MARK)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, env=environment, start_new_session=True
    ) as process:
        os.environ[MARK] = name
        try:
            yield
        finally:
            if before is None:
                del os.environ[MARK]
            else:
                os.environ[MARK] = before
            process.communicate()
