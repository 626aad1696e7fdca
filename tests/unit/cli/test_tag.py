"""Tags on the command line, and the other names of versions that commands take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.cli.support import Pushed, invoke, ok, read_checkpoint, same


def test_a_tag_is_set_listed_moved_and_deleted(pushed: Pushed) -> None:
    assert "no tag is set" in ok("tag", pushed.url).stdout
    assert "best is version 1" in ok("tag", pushed.url, "best", "--version", 1).stdout
    moved = ok("tag", pushed.url, "best", "--step", 2, "--json").document
    assert (moved["name"], moved["version"], moved["before"]) == ("best", 2, 1)
    assert ok("tag", pushed.url, "last").stdout.startswith("✓  last is version 3")
    listed = ok("tag", pushed.url, "--json").document["tags"]
    assert [(row["name"], row["version"], row["number"]) for row in listed] == [
        ("best", 2, 1),
        ("last", 3, 0),
    ]
    assert "best" in ok("tag", pushed.url).stdout
    assert "best is removed; it was version 2" in ok("tag", pushed.url, "best", "--delete").stdout
    gone = invoke("tag", pushed.url, "best", "--delete")
    assert gone.code == 4
    assert "tags are last" in gone.stderr
    removed = ok("tag", pushed.url, "last", "--delete", "--json").document
    assert (removed["version"], removed["before"]) == (None, 3)


@pytest.mark.parametrize(
    "args",
    [
        ("--delete",),
        ("--version", 1),
        ("x", "--delete", "--version", 1),
        ("x", "--version", 1, "--step", 1),
        ("a/b",),
    ],
)
def test_what_cannot_be_meant_is_refused(pushed: Pushed, args: tuple[object, ...]) -> None:
    done = invoke("tag", pushed.url, *args)
    assert done.code == 2
    assert "hint   " in done.stderr


def test_an_expired_version_is_not_tagged(pushed: Pushed) -> None:
    for part in (pushed.url).glob("*s/0*/*.safetensors"):
        if int(part.parent.name[:20]):
            part.unlink()
    done = invoke("tag", pushed.url, "best")
    assert done.code == 4
    assert "cannot be rebuilt" in done.stderr


@pytest.mark.parametrize("name", ["step", "tag", "at"])
def test_a_version_is_pulled_by_another_name(pushed: Pushed, tmp_path: Path, name: str) -> None:
    ok("tag", pushed.url, "best", "--version", 1)
    rows = ok("log", pushed.url, "--json").document["versions"]
    value = {"step": 1, "tag": "best", "at": rows[2]["time"]}[name]
    done = ok("pull", pushed.url, "--out", tmp_path / "out", f"--{name}", value, "--json")
    assert done.document["version"] == 1
    assert same(read_checkpoint(tmp_path / "out"), pushed.states[1])


def test_log_inspect_and_verify_take_the_same_names(pushed: Pushed) -> None:
    ok("tag", pushed.url, "best", "--version", 1)
    for option, value in (("--tag", "best"), ("--step", 1)):
        shown = ok("log", pushed.url, option, value, "--json").document
        assert [row["version"] for row in shown["versions"]] == [1, 0]
        assert shown["head"] == 3
        assert ok("inspect", pushed.url, option, value, "--json").document["version"] == 1
        assert ok("verify", pushed.url, option, value, "--json").document["last"] == 1
    assert (
        json.loads(ok("log", pushed.url, "--version", 2, "--json").stdout)["versions"][0]["version"]
        == 2
    )


def test_a_step_that_is_not_there_names_its_neighbours(pushed: Pushed) -> None:
    done = invoke("pull", pushed.url, "--out", "x", "--step", 9)
    assert done.code == 4
    assert "hint   near it are the steps 3 (version 3)" in done.stderr
    assert invoke("log", pushed.url, "--at", "1970-01-02T00:00Z").code == 4
    assert invoke("log", pushed.url, "--at", "noon").code == 2
    assert invoke("verify", pushed.url, "--to", 1, "--step", 1).code == 2
