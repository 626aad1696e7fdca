"""``deltachain fleet`` and what it prints of replicas."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Semaphore
from typing import Any

import pytest

from deltachain.replica.leader import Leader
from tests.unit.cli.support import invoke
from tests.unit.control.replicas import app_of, followed, leader_of, served

TOKEN = "one that nobody guesses"  # noqa: S105
GONE = "http://127.0.0.1:9"


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[Leader]:
    for here in followed(tmp_path):
        yield from leader_of(here)


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    return file


def test_status_of_all_and_who_is_gone(leader: Leader, token: Path) -> None:
    with served(app_of(leader, token=TOKEN)) as url:
        told = invoke("fleet", "update", "--version", 1, "--token-file", token, url)
        assert told.code == 0
        found = invoke("fleet", "status", "--token-file", token, "--json", url, GONE)
    first, second = found.document["replicas"]
    assert (first["engine"], first["version"], first["ready"]) == (url, 1, False)
    assert "did not answer" in second["error"]
    assert "see whether it runs" in second["hint"]
    assert found.code == 7


@pytest.mark.parametrize("words", [("fleet", "status", GONE), ("agent", "x", "--engine", GONE)])
@pytest.mark.parametrize("option", ["--token", "--key", "--tok", "--token-fi"])
def test_no_secret_is_an_option(words: tuple[str, ...], option: str) -> None:
    """Whoever may list processes sees what they were started with."""
    refused = invoke(*words, option, "secret")
    assert refused.code == 2
    assert "No such option" in refused.stderr


@pytest.mark.parametrize("content", [None, b"", b"\n", b"one\x01\n", b"\xff\xfe"])
def test_a_file_without_a_token_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    refused = invoke("fleet", "status", "--token-file", file, GONE)
    assert refused.code == 2
    assert str(file) in refused.stderr
    assert "one token" in refused.stderr


def test_the_environment_says_it_too_and_is_checked(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTACHAIN_TOKEN", TOKEN)
    with served(app_of(leader, token=TOKEN)) as url:
        assert invoke("fleet", "status", url).code == 0
    monkeypatch.setenv("DELTACHAIN_TOKNE", TOKEN)
    refused = invoke("fleet", "status", GONE)
    assert refused.code == 2
    assert "DELTACHAIN_TOKEN" in refused.stderr


def test_the_table(leader: Leader, token: Path) -> None:
    leader.update()
    with served(app_of(leader, token=TOKEN)) as url:
        shown = invoke("fleet", "status", "--token-file", token, url)
        refused = invoke("fleet", "pause", url)
    assert "ready" in shown.stdout
    assert url in shown.stdout
    assert shown.stdout.endswith("newest version held: 2\n")
    assert "401" in refused.stdout
    assert refused.code == 7
    assert leader.status().paused is False


def test_only_some_verbs_take_a_version() -> None:
    assert invoke("fleet", "pause", "--version", 1, GONE).code == 2


def test_an_inventory_names_the_replicas(leader: Leader, tmp_path: Path) -> None:
    leader.update()
    file = tmp_path / "replicas.txt"
    with served(app_of(leader, is_open=True)) as url:
        file.write_text(f"# all of them\n{url}/  # the first\n{GONE}\n")
        found = invoke("fleet", "status", "--inventory", file, "--json")
    rows = found.document["replicas"]
    assert [(row["engine"], row["health"]) for row in rows] == [(url, "ready"), (GONE, "failed")]
    assert (rows[0]["lag_versions"], rows[0]["software"]) == (0, "fake/1.0")
    assert found.code == 7


def test_the_environment_names_the_replicas(
    leader: Leader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(app_of(leader, is_open=True)) as url:
        monkeypatch.setenv("DELTACHAIN_ENGINES", f"{url}, {url}/")
        assert len(invoke("fleet", "status", "--json").document["replicas"]) == 1
        file = tmp_path / "replicas.txt"
        file.write_text(f"{GONE}\n")
        monkeypatch.setenv("DELTACHAIN_ENGINES", str(file))
        found = invoke("fleet", "status", "--json").document["replicas"]
        assert [row["engine"] for row in found] == [GONE]
        assert invoke("fleet", "status", url).code == 0  # what is given counts


def test_a_name_that_cannot_be_resolved_is_a_row(leader: Leader) -> None:
    with served(app_of(leader, is_open=True)) as url:
        name = "dns://no.such.name.invalid:8000"
        found = invoke("fleet", "status", "--json", url, name)
    rows = {row["engine"]: row["health"] for row in found.document["replicas"]}
    assert rows == {url: "not ready", name: "failed"}
    assert found.code == 7


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("status",), "no replica is given"),
        (("status", "--inventory", "x", GONE), "exclude each other"),
        (("update", "--watch", GONE), "watch `status`"),
        (("status", "dns://policy"), "no port"),
        (("status", "policy:8000"), "not a server address"),
    ],
)
def test_wrong_calls_say_what_to_do(words: tuple[str, ...], said: str) -> None:
    refused = invoke("fleet", *words)
    assert refused.code == 2
    assert said in refused.stderr


@pytest.mark.parametrize("options", [["--json"], []])
def test_watching_goes_on_until_it_is_interrupted(leader: Leader, options: list[str]) -> None:
    leader.update()
    app, asked = app_of(leader, is_open=True), Semaphore(0)

    async def counting(scope: Any, receive: Any, send: Any) -> None:
        await app(scope, receive, send)
        if scope["type"] == "http":
            asked.release()

    with served(counting) as url:
        words = ["fleet", "status", "--watch", "--every", "0.1", *options, url]
        process = subprocess.Popen(
            [sys.executable, "-m", "deltachain", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3):  # two rounds are complete once there is a third
            assert asked.acquire(timeout=60)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    if options:
        rounds = [json.loads(line) for line in stdout.splitlines()]
        assert len(rounds) >= 2
        assert {one["replicas"][0]["health"] for one in rounds} == {"ready"}
    else:
        assert "1 replica: 1 ready" in stdout
