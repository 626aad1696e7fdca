from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import deltachain
from deltachain.cli.app import MEANT, PANELS, explain
from deltachain.cli.console import bar, clean, count, moment, nbytes, percent
from tests.unit.cli.support import (
    Pushed,
    invoke,
    ok,
    read_checkpoint,
    same,
    write_checkpoint,
)

COMMANDS = [c.__name__.replace("_", "-") for commands in PANELS.values() for c in commands]


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["push", "--help"]])
def test_help_and_version_load_nothing_heavy(args: list[str]) -> None:
    code = (
        "import sys, contextlib, io\n"
        f"sys.argv = ['deltachain', *{args!r}]\n"
        "from deltachain.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit): main()\n"
        "print({'torch', 'numba', 'numpy', 'transformers'} & sys.modules.keys())"
    )
    assert python(code).strip() == "set()"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_results_are_printed_in_any_encoding(pushed: Pushed, tmp_path: Path, encoding: str) -> None:
    def run(*words: object) -> bytes:
        done = subprocess.run(
            [sys.executable, "-m", "deltachain", *map(str, words)],
            capture_output=True,
            env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"},
            check=False,
        )
        told = b"info  compiling kernels, which takes seconds once on this machine\n"
        assert done.returncode == 0, done.stderr.decode()
        assert done.stderr in {b"", told}
        return done.stdout

    folder = tmp_path / "é 名"
    tick = "✓" if encoding == "utf-8" else "ok"
    assert run("pull", pushed.url, "--out", folder).decode(encoding).startswith(f"{tick}  version")
    assert ("█" if encoding == "utf-8" else "#") in run("stats", pushed.url).decode(encoding)
    told = json.loads(run("pull", pushed.url, "--out", folder, "--json"))
    assert told["out"] == str(folder)


def test_a_missing_extra_is_named() -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from deltachain.cli import main\n"
        "sys.argv = ['deltachain', 'push', 'x', 'y']\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'deltachain[torch]'" in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    shown = ok(command, "--help").stdout
    assert f"Example: deltachain {command}" in shown


def test_version() -> None:
    assert ok("--version").stdout.strip() == f"deltachain {deltachain.__version__}"


def test_errors_go_to_stderr_with_their_hint_and_exit_code(tmp_path: Path) -> None:
    done = invoke("log", "nonsense://bucket/chain")
    assert (done.code, done.stdout) == (2, "")
    assert "hint" in done.stderr
    done = invoke("log", tmp_path / "nothing", "--json")
    assert (done.code, done.stdout) == (3, "")
    assert invoke("nonsense").code == 2
    assert invoke("pull", "x").code == 2
    done = invoke("inspect", tmp_path / "nothing.safetensors")
    assert done.code == 3


def test_errors_of_the_file_system_are_told_with_a_hint() -> None:
    explained = explain(FileNotFoundError(errno.ENOENT, "No such file or directory", "absent/d"))
    assert explained is not None
    assert (explained.exit_code, explained.args) == (1, ("absent/d: No such file or directory",))
    assert "check the path" in explained.hint


def test_debug_shows_the_traceback_wherever_it_stands(tmp_path: Path) -> None:
    for args in (["--debug", "log", str(tmp_path)], ["log", str(tmp_path), "--debug"]):
        done = invoke(*args)
        assert done.code == 3
        assert "Traceback" in done.stderr
        assert "ObjectNotFoundError" in done.stderr.splitlines()[-3]


def test_ctrl_c_is_answered_with_130(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("deltachain.store.open_store", interrupted)
    done = invoke("log", tmp_path)
    assert (done.code, done.stdout) == (130, "")
    assert "interrupted" in done.stderr


def test_a_version_a_line_while_following(pushed: Pushed, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ok("pull", pushed.url, "--version", 0, "--out", out)
    done = ok("follow", pushed.url, "--out", out, "--once", "--every-version", "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["version"] for line in lines] == [1, 2, 3]
    assert same(read_checkpoint(out), pushed.states[3])
    assert ok("follow", pushed.url, "--out", out, "--once", "--json").stdout == ""


@contextmanager
def following(url: Path, out: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "deltachain", "follow", str(url), "--out", str(out)]
    process = subprocess.Popen(
        [*command, "--poll", "0.1", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_following_may_begin_before_the_trainer(pushed: Pushed, tmp_path: Path) -> None:
    with following(tmp_path / "later", tmp_path / "out") as process:
        assert process.stdout is not None
        ok("push", write_checkpoint(tmp_path / "first", pushed.states[0]), tmp_path / "later")
        assert '"version": 0' in process.stdout.readline()


def test_figures_are_short_and_never_hide_what_is_there() -> None:
    assert [nbytes(n) for n in (0, 999, 1000, 1_520_000, 999_999)] == [
        "0 B", "999 B", "1.00 kB", "1.52 MB", "1.00 MB",
    ]  # fmt: skip
    assert [count(n) for n in (0, 999, 12_345, 7 * 10**9)] == ["0", "999", "12.3 k", "7.00 G"]
    assert [percent(x) for x in (0.0, 1e-9, 0.0123, 1.0)] == ["0 %", "<0.01 %", "1.23 %", "100 %"]
    assert bar(0.0).plain == ""
    assert bar(1e-9).plain == "▏"
    assert bar(1.0, 4).plain == "████"
    assert clean("a\x1b[31mb\u202e") == "a\ufffd[31mb\ufffd"


def test_a_time_of_another_year_shows_the_year() -> None:
    now = time.localtime()
    today = time.mktime((now.tm_year, now.tm_mon, now.tm_mday, 9, 5, 0, 0, 0, -1))
    assert moment(today) == time.strftime("%d %b 09:05", now)
    then = time.mktime((now.tm_year - 2, 11, 24, 3, 49, 0, 0, 0, -1))
    assert moment(then) == f"24 Nov {now.tm_year - 2}"


@pytest.mark.parametrize("word", MEANT)
def test_a_guessed_command_is_answered_with_ours(word: str) -> None:
    done = invoke(word, "/mnt/policy")
    assert done.code == 2
    assert f"unknown command '{word}'" in done.stderr
    ours = set(re.findall(r"`(?:deltachain )?([a-z]+)", MEANT[word])) - {"deltachain"}
    assert ours or "--version" in MEANT[word]
    assert ours <= {function.__name__ for panel in PANELS.values() for function in panel}
