"""Commands that run until they are stopped: one rule of exit codes for all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import httpx
import pytest

from tests.unit.cli.support import Pushed

Words = Callable[[Path, Path], list[object]]

LONG_COMMANDS: dict[str, Words] = {
    "follow": lambda url, new: ["follow", url, "--out", new, "--poll", 0.1, "--json"],
    "mirror": lambda url, new: ["mirror", url, new, "--follow", "--poll", 0.1, "--json"],
    "maintain": lambda _, new: ["maintain", new, "--every", "1s"],  # says that it waits for a chain
    "dashboard": lambda url, _: ["dashboard", url, "--listen", 0, "--poll", 0.1],
}


def first_line(process: subprocess.Popen[str], name: str) -> str:
    """Return the first line of a command, printed once it handles signals."""
    stream: IO[str] | None = process.stdout if name in ("follow", "mirror") else process.stderr
    assert stream is not None
    return stream.readline()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
@pytest.mark.parametrize("name", LONG_COMMANDS)
def test_ctrl_c_is_130_and_sigterm_is_0(
    pushed: Pushed, tmp_path: Path, name: str, number: signal.Signals, code: int
) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "deltachain",
            *map(str, LONG_COMMANDS[name](pushed.url, tmp_path / "new")),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        said = first_line(process, name)
        if name == "dashboard":
            httpx.get(said.split()[-1], timeout=60)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == code, stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_dashboard_that_does_not_serve_yet_ends_too(
    pushed: Pushed, number: signal.Signals, code: int
) -> None:
    words = LONG_COMMANDS["dashboard"](pushed.url, pushed.url)
    process = subprocess.Popen(
        [sys.executable, "-m", "deltachain", *map(str, words)], stderr=subprocess.PIPE, text=True
    )
    try:
        assert "dashboard of" in first_line(process, "dashboard")
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == code, stderr


IN_A_WAIT = """
import signal
from threading import Event
from deltachain.cli.serving import stopping
stop, woken = Event(), Event()
with stopping(stop, woken.set) as by:
    with stop._cond:  # as Event.wait has it for a moment, between two bytecodes
        signal.raise_signal(signal.SIGINT)
    assert stop.wait(60) and woken.wait(60)
assert by == [signal.SIGINT]
"""


def test_a_signal_may_come_in_the_middle_of_a_wait() -> None:
    subprocess.run([sys.executable, "-c", IN_A_WAIT], check=True, timeout=120)
