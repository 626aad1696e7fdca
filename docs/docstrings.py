"""Docstrings as Markdown has them: examples at a prompt, and blocks after two colons, are code."""

import re
from typing import Any, Final

import griffe

_PROMPT: Final = re.compile(r"(?:^>>> .*\n?(?:^(?:\.\.\. .*|\S.*)\n?)*)+", re.MULTILINE)
_SKIPPED: Final = re.compile(r" *# doctest: \+SKIP")


class MarkdownDocstrings(griffe.Extension):
    """Rewrites each docstring as it is read."""

    def on_object(self, *, obj: Any, **_: object) -> None:  # noqa: ANN401 - griffe's own
        """Rewrite one."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """A docstring with its examples in fences, and without the colons of reStructuredText."""
    text = re.sub(r"^::\n\n", "", text, flags=re.MULTILINE)
    return _PROMPT.sub(_fenced, re.sub(r"::$", ":", text, flags=re.MULTILINE))


def _fenced(example: re.Match[str]) -> str:
    lines = _SKIPPED.sub("", example[0]).rstrip("\n")
    return f"```pycon\n{lines}\n```\n"
