"""What the READMEs tell people to type: each ``hf`` command is held against the client's help."""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[3]
READMES: Final = [ROOT / "README.md", *sorted((ROOT / "spaces").glob("*/README.md"))]
DOCUMENTS: Final = [*READMES, *sorted((ROOT / "docs").glob("*.md"))]
ROLLOUT: Final = ROOT / "spaces" / "rollout"

BLOCK: Final = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SUBCOMMAND: Final = re.compile(r"^  ([a-z][\w-]*) {2,}\S", re.MULTILINE)
OPTION: Final = re.compile(r"(?<![\w-])(--?[A-Za-z][\w-]*)")
VARIABLE: Final = re.compile(r"\$\{?([A-Z][A-Z_]+)\b")


def commands(readme: Path) -> Iterator[list[str]]:
    for block in BLOCK.findall(readme.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|;", line):
                if part.strip().startswith("hf "):
                    yield shlex.split(part, comments=True)


FOUND: Final = [(readme, words) for readme in DOCUMENTS for words in commands(readme)]


@functools.cache
def text_of(*path: str) -> str:
    program = Path(sysconfig.get_path("scripts")) / "hf"
    done = subprocess.run(
        [program, *path, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"COLUMNS": "200", "NO_COLOR": "1"},
    )
    return done.stdout


def subcommands(path: tuple[str, ...]) -> set[str]:
    help_ = text_of(*path)
    if not re.match(r"Usage: .*COMMAND\]? \[ARGS\]", help_):
        return set()
    return set(SUBCOMMAND.findall(help_.partition("\nExamples")[0]))


def fault(words: list[str]) -> str:
    path: tuple[str, ...] = ()
    rest = words[1:]
    while known := subcommands(path):
        if not rest or rest[0] not in known:
            return f"hf {' '.join(path)} has no {rest[:1]}"
        path, rest = (*path, rest[0]), rest[1:]
    options = set(OPTION.findall(text_of(*path).partition("\nExamples")[0]))
    used = {word.partition("=")[0] for word in rest if word.startswith("-")}
    return f"hf {' '.join(path)} has no {used - options}" if used - options else ""


@pytest.mark.parametrize(
    "words",
    [words for _, words in FOUND],
    ids=[f"{readme.relative_to(ROOT)}: {' '.join(words)[:60]}" for readme, words in FOUND],
)
def test_the_client_knows_each_command(words: list[str]) -> None:
    assert fault(words) == ""


def test_commands_are_found_where_they_are() -> None:
    assert len(FOUND) > 10
    assert {words[1] for _, words in FOUND} >= {"auth", "buckets", "repos", "upload"}


@pytest.mark.parametrize(
    "command",
    [
        "hf repo create me/x",
        "hf repos make me/x",
        "hf repos",
        "hf repos create me/x --space_sdk docker",
        "hf buckets create me/x --public",
        "hf spaces secrets add me/x --secret A=b",
    ],
)
def test_what_the_client_does_not_know_is_noticed(command: str) -> None:
    assert fault(command.split())


def test_every_variable_is_in_the_table() -> None:
    texts = [(ROLLOUT / name).read_text("utf-8") for name in ("entrypoint.sh", "Dockerfile")]
    _, _, table = (ROLLOUT / "README.md").read_text(encoding="utf-8").partition("## Settings")
    # Bash's own, those that are set here, and vLLM's and SGLang's, which are only added to.
    others = {"HOME", "SECONDS", "DELTACHAIN_BASE", "VLLM_PLUGINS", "SGLANG_PLUGINS"}
    used = {name for text in texts for name in VARIABLE.findall(text)} - others
    documented = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", table))
    assert used == {name for name in documented if not name.startswith("AWS_")} - {
        "DELTACHAIN_PAUSE",
        "DELTACHAIN_POLL_S",
    }
    assert used


@pytest.mark.parametrize("readme", READMES[1:], ids=lambda readme: str(readme.parent.name))
def test_no_secret_is_typed_into_a_command(readme: Path) -> None:
    for words in commands(readme):
        assert not any(re.match(r"\w*(TOKEN|KEY)\w*=", word) for word in words)
        assert not {"--token", "-s", "--secrets"} & set(words)
