import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deltachain.publish import Publisher
from tests.support.models import TinyModel, train_
from tests.support.values import eventually
from tests.unit.cli.support import Pushed, invoke, ok, refused, running, write_checkpoint
from tests.unit.control.replicas import status

HOUR = 3600.0
ESCAPES = "\x1b[2J\x1b]0;owned\x07<script>alert(1)</script>"


def record_of(board: Path) -> Path:
    """The only record, as soon as it is there."""
    eventually(lambda: [*board.glob("*.json")])
    (file,) = board.glob("*.json")
    return file


def rows(board: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = invoke("fleet", "status", "--json", "--presence", board).document[
        "replicas"
    ]
    return found


@pytest.mark.full
def test_a_follower_that_is_killed_is_silent(pushed: Pushed, tmp_path: Path) -> None:
    board, out = tmp_path / "replicas", tmp_path / "out"
    words = ("follow", pushed.url, "--out", out, "--poll", "0.1", "--json")
    with running(*words, DELTACHAIN_PRESENCE_URL=board) as follower:
        assert json.loads(follower.line())["version"] == len(pushed.states) - 1
        file = record_of(board)
        (row,) = rows(board)
        assert row["software"] == "follow"
        assert row["health"] in ("ready", "not ready")  # it may have written before it applied
        follower.end(signal.SIGKILL)
    before = time.time() - HOUR  # an hour passes
    os.utime(file, (before, before))
    (row,) = rows(board)
    assert row["health"] == "silent"
    shown = refused("fleet", "status", "--presence", board, code=7)
    assert "silent" in shown.stdout
    assert "has not written its presence for 3600 s" in shown.stdout.replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "number", "code"),
    [
        pytest.param(("follow", "--out"), signal.SIGTERM, 0, marks=pytest.mark.full),
        (("mirror", "--follow"), signal.SIGINT, 130),
    ],
)
def test_who_ends_takes_its_presence_away(
    pushed: Pushed, tmp_path: Path, words: tuple[str, str], number: signal.Signals, code: int
) -> None:
    board, (command, option) = tmp_path / "replicas", words
    place = (command, pushed.url, option, tmp_path / "out")
    with running(*place, DELTACHAIN_PRESENCE_URL=board) as follower:
        record_of(board)
        (row,) = rows(board)
        assert row["software"] == command
        assert follower.end(number).code == code
    assert [*board.glob("*.json")] == []


@pytest.mark.full
def test_an_error_that_ends_a_follower_is_told_by_its_record(
    pushed: Pushed, tmp_path: Path
) -> None:
    board, out, other = tmp_path / "replicas", tmp_path / "out", tmp_path / "other"
    ok("pull", pushed.url, "--out", out)
    ok("push", write_checkpoint(tmp_path / "model", pushed.states[0]), other)
    with running("follow", other, "--out", out, DELTACHAIN_PRESENCE_URL=board) as follower:
        assert follower.process.wait(60) != 0
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
    done = refused(*named, code=2)
    assert f"the chain {pushed.url}" in done.stderr.replace("\n", "")


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
    refused("fleet", "pause", "--presence", tmp_path, code=2, said="takes no pause")


def test_hostile_records_do_not_reach_the_terminal(tmp_path: Path) -> None:
    texts = ("url", "chain", "state", "trouble", "engine", "deltachain")
    hostile = dict.fromkeys(texts, ESCAPES) | {"ready": False, "reason": ESCAPES * 99}
    told = msgspec.to_builtins(status(1, **hostile))
    for name, content in (
        ("escapes", json.dumps({"presence": 1, "time": 1, "status": told})),
        ("name", json.dumps({"presence": ESCAPES})),
        ("nested", "[" * 100_000),
    ):
        (tmp_path / f"{name}.json").write_text(content)
    shown = refused("fleet", "status", "--presence", tmp_path, code=7)
    assert "\x1b]" not in shown.stdout
    assert "\x07" not in shown.stdout
    assert len(rows(tmp_path)) == 3


def scraped(url: str) -> dict[str, float]:
    return {
        one.labels.get("engine", one.name): one.value
        for family in text_string_to_metric_families(httpx.get(url).text)
        for one in family.samples
    }


@pytest.mark.full
@pytest.mark.parametrize("command", ["follow", "mirror"])
def test_followers_show_what_they_hold(command: str, tmp_path: Path) -> None:
    chain, model = tmp_path / "chain", TinyModel()
    place = ["--out", tmp_path / "out"] if command == "follow" else [tmp_path / "out", "--follow"]
    words = [command, chain, *place, "--metrics", "0", "--poll", "0.01", "--json"]
    with (
        Publisher(str(chain)).attach(model, assets={}) as publisher,
        running(*words) as follower,
    ):
        url = follower.error_line().split()[-1]
        assert follower.line().startswith("{")
        train_(model, 1)
        publisher.publish(step=1)
        publisher.flush()
        assert follower.line().startswith("{")
        eventually(lambda: scraped(url)["deltachain_applies_total"] >= 2)
        found = scraped(url)
        assert found["deltachain_version"] == found["deltachain_head_version"] == 1
        assert (found["deltachain_lag_versions"], found[command]) == (0, 1)
        assert found["deltachain_last_look_timestamp_seconds"] <= time.time()
        assert httpx.get(url.replace("/metrics", "/readyz")).status_code == 200
        done = follower.end(signal.SIGTERM)
    assert done.code == 0, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("follow", "x", "--out", "y", "--once", "--metrics", "0"),
        ("agent", "x", "--engine", "http://127.0.0.1:9", "--out", "y", "--once", "--metrics", "0"),
    ],
)
def test_a_command_that_ends_by_itself_has_no_metrics(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(*words, code=2, said="--metrics is for a command that follows")
