"""Links of documents lead somewhere, commands and their options exist, the README is short."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from typer.main import get_command

from deltachain.cli.app import app

ROOT: Final = Path(__file__).resolve().parents[2]

DOCUMENTS: Final = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "deltachain").glob("*.md")),
    *sorted(ROOT.glob("*_ext/README.md")),
    *sorted(ROOT.glob("spaces/*/README.md")),
    *sorted(ROOT.glob("examples/*/README.md")),
]

TABLES: Final = ROOT / "BENCHMARKS.md"
"""Rows of its tables begin like commands."""

LINK: Final = re.compile(r"\]\((?!https?://|#)([^)\s#]+)[^)]*\)")
BLOCK: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL: Final = ("", "bash", "sh", "console")

COMMANDS: Final = get_command(app).commands  # type: ignore[attr-defined]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def typed(path: Path) -> Iterator[list[str]]:
    """The words of every ``deltachain`` command in blocks of a document, one a line."""
    for language, block in BLOCK.findall(path.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines() if language in SHELL else ():
            if re.match(r"(\$ )?deltachain [a-z]", line):
                yield shlex.split(line.removeprefix("$ "), comments=True)


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_links_lead_somewhere(document: Path) -> None:
    links = LINK.findall(document.read_text(encoding="utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if d != TABLES], ids=named)
def test_commands_and_their_options_exist(document: Path) -> None:
    for _, name, *words in typed(document):
        assert name in COMMANDS
        known = {option for found in COMMANDS[name].params for option in found.opts}
        used = {word.partition("=")[0] for word in words if word.startswith("-")}
        assert used <= known | {"--help"}, name


def test_commands_are_found() -> None:
    assert (
        len([words for document in DOCUMENTS if document != TABLES for words in typed(document)])
        > 12
    )


def test_the_readme_is_short_and_has_one_picture() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 160
    assert len(re.findall(r"!\[", text)) == 1
