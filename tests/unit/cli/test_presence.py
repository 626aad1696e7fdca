"""Processes that follow show their presence, and ``deltachain fleet`` sees them live and die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.cli.support import Pushed, invoke, ok, write_checkpoint

HOUR = 3600.0
ESCAPES = "\x1b[2J\x1b]0;owned\x07<script>alert(1)</script>"


@contextmanager
def running(board: Path, *words: object) -> Iterator[subprocess.Popen[str]]:
    """A command that follows, with its presence at a board."""
    process = subprocess.Popen(
        [sys.executable, "-m", "deltachain", *map(str, words)],
        env=os.environ | {"DELTACHAIN_PRESENCE_URL": str(board)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def record_of(board: Path) -> Path:
    """The only record, as soon as it is there."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        found = [*board.glob("*.json")]
        if found:
            return found[0]
        time.sleep(0.02)
    raise AssertionError("no presence was written")


def rows(board: Path, *words: object) -> list[dict[str, object]]:
    found: list[dict[str, object]] = invoke(
        "fleet", "status", "--json", "--presence", board, *words
    ).document["replicas"]
    return found


def test_a_follower_that_is_killed_is_silent(pushed: Pushed, tmp_path: Path) -> None:
    board, out = tmp_path / "replicas", tmp_path / "out"
    with running(board, "follow", pushed.url, "--out", out, "--poll", "0.1", "--json") as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["version"] == len(pushed.states) - 1
        file = record_of(board)
        (row,) = rows(board)
        assert row["software"] == "follow"
        assert row["health"] in ("ready", "not ready")  # it may have written before it applied
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = time.time() - HOUR  # an hour passes
    os.utime(file, (before, before))
    (row,) = rows(board)
    assert row["health"] == "silent"
    shown = invoke("fleet", "status", "--presence", board)
    assert shown.code == 7
    assert "silent" in shown.stdout
    assert "has not written its presence for 3600 s" in shown.stdout.replace("\n", " ")


def test_a_follower_that_ends_takes_its_presence_away(pushed: Pushed, tmp_path: Path) -> None:
    board = tmp_path / "replicas"
    with running(board, "follow", pushed.url, "--out", tmp_path / "out") as process:
        record_of(board)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert [*board.glob("*.json")] == []


def test_a_mirror_shows_itself(pushed: Pushed, tmp_path: Path) -> None:
    board, copy = tmp_path / "replicas", tmp_path / "copy"
    with running(board, "mirror", pushed.url, copy, "--follow", "--json") as process:
        record_of(board)
        (row,) = rows(board)
        assert row["software"] == "mirror"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert [*board.glob("*.json")] == []


def test_an_error_that_ends_a_follower_is_told_by_its_record(
    pushed: Pushed, tmp_path: Path
) -> None:
    board, out, other = tmp_path / "replicas", tmp_path / "out", tmp_path / "other"
    ok("pull", pushed.url, "--out", out)
    ok("push", write_checkpoint(tmp_path / "model", pushed.states[0]), other)
    with running(board, "follow", other, "--out", out) as process:
        assert process.wait(60) != 0
    (row,) = rows(board)
    assert row["health"] == "failed"
    assert "it ended" in str(row["why"])


@pytest.mark.parametrize(
    "words",
    [
        ("follow", "{chain}", "--out", "{out}"),
        ("agent", "{chain}", "--engine", "http://127.0.0.1:9", "--out", "{out}"),
        ("mirror", "{chain}", "{out}", "--follow"),
        ("mirror", "/nowhere/else", "{chain}", "--follow"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
@pytest.mark.parametrize("place", ["", "/replicas"])
def test_a_presence_inside_the_chain_is_refused(
    pushed: Pushed,
    tmp_path: Path,
    words: tuple[str, ...],
    place: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DELTACHAIN_PRESENCE_URL", f"{pushed.url}{place}")
    named = [word.format(chain=pushed.url, out=tmp_path / "out") for word in words]
    refused = invoke(*named)
    assert refused.code == 2
    assert f"the chain {pushed.url}" in refused.stderr.replace("\n", "")


def test_boards_are_named_in_inventories_too(tmp_path: Path) -> None:
    board = tmp_path / "replicas"
    file = tmp_path / "replicas.txt"
    file.write_text(f"http://127.0.0.1:9\n{board.as_uri()}  # those behind NAT\n")
    found = invoke("fleet", "status", "--json", "--inventory", file)
    assert [row["engine"] for row in found.document["replicas"]] == [
        "http://127.0.0.1:9",
        board.as_uri(),
    ]
    assert found.code == 7


def test_a_presence_takes_no_orders(tmp_path: Path) -> None:
    refused = invoke("fleet", "pause", "--presence", tmp_path)
    assert refused.code == 2
    assert "takes no pause" in refused.stderr


def test_hostile_records_do_not_reach_the_terminal(tmp_path: Path) -> None:
    status = {
        "url": ESCAPES,
        "chain": ESCAPES,
        "version": 1,
        "state": ESCAPES,
        "staged": None,
        "head": 1,
        "lag_versions": 0,
        "ready": False,
        "reason": ESCAPES * 99,
        "following": True,
        "paused": False,
        "pinned": False,
        "poisoned": False,
        "classes": {},
        "on_host": {},
        "ranks": [],
        "last": None,
        "trouble": ESCAPES,
        "engine": ESCAPES,
        "deltachain": ESCAPES,
    }
    for name, content in (
        ("escapes", json.dumps({"presence": 1, "time": 1, "status": status})),
        ("name", json.dumps({"presence": ESCAPES})),
        ("nested", "[" * 100_000),
    ):
        (tmp_path / f"{name}.json").write_text(content)
    shown = invoke("fleet", "status", "--presence", tmp_path)
    assert shown.code == 7
    assert "\x1b]" not in shown.stdout
    assert "\x07" not in shown.stdout
    assert len(rows(tmp_path)) == 3
