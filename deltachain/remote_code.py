"""Pointers to code elsewhere, in the small files of a checkpoint.

No code travels with a chain. But ``auto_map`` may name a class in a repository of anybody's, and
who loads the folder with ``trust_remote_code=True`` fetches and runs it. A reference to a file
beside the weights (``modeling_x.X``) leads to no code that a chain can bring, and is left.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from typing import Any, Final

logger = logging.getLogger(__name__)

POINTERS: Final = ("auto_map", "custom_pipelines")
"""Fields, at any depth, whose values name code."""

ELSEWHERE: Final = "--"
"""What stands between a repository and a class of its."""

CLASS_ELSEWHERE: Final = re.compile(rf"[\w.-]+/[\w.-]+{ELSEWHERE}[\w.]+")
"""A class of a repository. It is taken out of any field: who reads one may fetch and run it."""


def without_remote_code(name: str, data: bytes, *, trusted: bool, where: str) -> bytes:
    """A small file without what names code elsewhere; the same bytes where nothing does.

    Args:
        name: Of the file.
        data: Its content.
        trusted: Whether such code is wanted.
        where: Whose file it is, for the warning.
    """
    plain = data.lower().replace(b"\\u002d", b"-")  # a hyphen may be written in two ways
    if trusted or not name.endswith(".json") or ELSEWHERE.encode() not in plain:
        return data
    try:
        document = json.loads(data)
        found = list(_strip(document, inside=False))
    except (ValueError, RecursionError):  # who loads it reads it the same way
        return data
    if not found:
        return data
    logger.warning(
        "%s: %s names code elsewhere (%s), and is taken without it; trust_remote_code keeps it",
        where,
        name,
        ", ".join(found),
    )
    return json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"


def _strip(value: Any, *, inside: bool) -> Iterator[str]:  # noqa: ANN401 - JSON
    """Remove, in place, what names code elsewhere; what that was."""
    items = list(value.items()) if isinstance(value, dict) else []
    if isinstance(value, list):
        items = list(enumerate(value))
    for key, inner in items:
        within = inside or key in POINTERS
        if isinstance(inner, str) and _names_code(inner, within=within):
            yield inner
            value[key] = None
        else:
            yield from _strip(inner, inside=within)
        if isinstance(value, dict) and within and _is_void(value[key]):
            del value[key]


def _names_code(text: str, *, within: bool) -> bool:
    return (within and ELSEWHERE in text) or CLASS_ELSEWHERE.fullmatch(text) is not None


def _is_void(value: Any) -> bool:  # noqa: ANN401 - JSON
    """Whether nothing is left of it."""
    if isinstance(value, dict | list):
        return all(_is_void(one) for one in (value.values() if isinstance(value, dict) else value))
    return value is None
