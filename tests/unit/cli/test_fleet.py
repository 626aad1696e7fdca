"""``deltachain fleet`` and what it prints of replicas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
    assert "401" in refused.stdout
    assert refused.code == 7
    assert leader.status().paused is False


def test_only_some_verbs_take_a_version() -> None:
    assert invoke("fleet", "pause", "--version", 1, GONE).code == 2
