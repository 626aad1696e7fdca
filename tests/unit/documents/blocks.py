"""Blocks of code in documents."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[3]

DOCUMENTS: Final = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "deltachain").glob("*.md")),
    *sorted(ROOT.glob("*_ext/README.md")),
    *sorted(ROOT.glob("spaces/*/README.md")),
    *sorted(ROOT.glob("examples/**/README.md")),
]

LANGUAGES: Final = {"", "python", "text", "ini", "json", "toml", "hexdump"}

_BLOCK: Final = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SUBSTITUTION: Final = re.compile(r"\$\([^)]*\)")
_ASSIGNMENT: Final = re.compile(r"[A-Z][A-Z0-9_]*=")


@dataclass(frozen=True, slots=True)
class Block:
    document: str
    number: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.number}"


@dataclass(frozen=True, slots=True)
class Command:
    document: str
    variables: dict[str, str]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.document}: {' '.join(self.words)[:60] or ' '.join(self.variables)}"


def blocks(language: str) -> Iterator[Block]:
    for path in DOCUMENTS:
        found = _BLOCK.findall(path.read_text(encoding="utf-8"))
        texts = [text for named, text in found if named == language]
        for number, text in enumerate(texts):
            yield Block(str(path.relative_to(ROOT)), number, language, text)


def languages() -> set[str]:
    texts = (path.read_text(encoding="utf-8") for path in DOCUMENTS)
    return {language for text in texts for language, _ in _BLOCK.findall(text)}


def commands() -> Iterator[Command]:
    for block in blocks(""):
        text = _SUBSTITUTION.sub("...", block.text.replace("\\\n", " "))
        for line in text.splitlines():
            for part in re.split(r"&&", line):
                words = shlex.split(part, comments=True)
                if words:
                    yield _command(block.document, words)


def _command(document: str, words: list[str]) -> Command:
    rest = words[1:] if words[0] == "export" else words
    variables: dict[str, str] = {}
    while rest and _ASSIGNMENT.match(rest[0]):
        name, _, value = rest.pop(0).partition("=")
        variables[name] = value
    return Command(document, variables, tuple(rest))
