"""Tokens, as text and in a file that changes while it is used."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from deltachain.environment import read_secret
from deltachain.errors import ConfigError
from deltachain.tokens import LARGEST, Tokens


def test_a_text_is_one_token() -> None:
    tokens = Tokens(" one\n")
    assert tokens.current == ("one",)
    assert tokens.accepts("one")
    assert not tokens.accepts("other")
    assert not tokens.accepts("")


@pytest.mark.parametrize("given", ["", " ", "\n"])
def test_no_token_accepts_nothing(given: str) -> None:
    tokens = Tokens(given)
    assert not tokens
    assert not tokens.accepts("")


def test_a_file_has_a_token_a_line_and_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("old\n")
    tokens = Tokens(file)
    assert list(tokens.current) == ["old"]
    file.write_text("new\r\n\nold\n")
    assert list(tokens.current) == ["new", "old"]
    assert tokens.accepts("new")
    assert tokens.accepts("old")
    file.write_text("new")
    assert not tokens.accepts("old")


def test_a_file_behind_a_link_is_read_again_as_kubernetes_replaces_it(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "token").write_text(name)
    data, file = tmp_path / "data", tmp_path / "token"
    data.symlink_to(tmp_path / "one")
    file.symlink_to(data / "token")
    tokens = Tokens(file)
    assert tokens.current == ("one",)
    following = tmp_path / "following"
    following.symlink_to(tmp_path / "two")
    following.rename(data)
    assert tokens.current == ("two",)


@pytest.mark.parametrize("broken", [None, b"", b"\n", b"\xff", b"a\x00b", b"x" * (LARGEST + 1)])
def test_a_file_that_breaks_keeps_its_last_tokens_and_is_told_once(
    tmp_path: Path, broken: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "token"
    file.write_text("one")
    tokens = Tokens(file)
    if broken is None:
        file.unlink()
    else:
        file.write_bytes(broken)
    with caplog.at_level(logging.WARNING, "deltachain"):
        for _ in range(3):
            assert tokens.current == ("one",)
            assert not tokens.accepts("")
    (told,) = caplog.messages
    assert "the tokens read before stay in use" in told
    file.write_text("two")
    assert tokens.current == ("two",)


@pytest.mark.parametrize("broken", [None, b"", b" \n", b"\xff", b"a\x00b", b"x" * (LARGEST + 1)])
def test_a_start_without_a_valid_file_is_refused(tmp_path: Path, broken: bytes | None) -> None:
    file = tmp_path / "token"
    if broken is not None:
        file.write_bytes(broken)
    with pytest.raises(ConfigError, match=str(file)) as caught:
        Tokens(file)
    assert caught.value.hint
    with pytest.raises(ConfigError):
        Tokens(tmp_path)


def test_the_environment_has_a_token_or_its_file_and_not_both() -> None:
    assert read_secret({}, "TOKEN") == ""
    assert read_secret({"DELTACHAIN_TOKEN": "a"}, "TOKEN") == "a"
    assert read_secret({"DELTACHAIN_TOKEN_FILE": "/a"}, "TOKEN") == Path("/a")
    both = {"DELTACHAIN_TOKEN_FILE": "/a", "DELTACHAIN_TOKEN": "very secret"}
    with pytest.raises(ConfigError, match="are both set") as caught:
        read_secret(both, "TOKEN")
    assert "very secret" not in str(caught.value)
