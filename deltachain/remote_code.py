"""References to remote code in the assets of a checkpoint.

A chain carries no code, but ``auto_map`` may name a class in any repository, and loading the folder
with ``trust_remote_code=True`` fetches and runs it. A reference to a file beside the weights
(``modeling_x.X``) is kept, because a chain cannot deliver that file.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from typing import Any, Final

logger = logging.getLogger(__name__)

POINTERS: Final = ("auto_map", "custom_pipelines")
"""Names of fields, at any depth, whose values refer to code."""

ELSEWHERE: Final = "--"
"""Separator between repository and class."""

CLASS_ELSEWHERE: Final = re.compile(rf"[\w.-]+/[\w.-]+{ELSEWHERE}[\w.]+")
"""A class in a repository; removed from any field, since a loader may fetch and run it."""


def without_remote_code(name: str, data: bytes, *, trusted: bool, where: str) -> bytes:
    """Remove references to remote code from an asset; return equal bytes if there are none.

    Args:
        name: File name.
        data: Content of the file.
        trusted: Whether references to remote code are kept.
        where: Origin of the file, for the warning.
    """
    plain = data.lower().replace(b"\\u002d", b"-")  # a hyphen may be written in two ways
    if trusted or not name.endswith(".json") or ELSEWHERE.encode() not in plain:
        return data
    try:
        document = json.loads(data)
        found = list(_strip(document, inside=False))
    except (ValueError, RecursionError):  # no loader can parse it either
        return data
    if not found:
        return data
    logger.warning(
        "%s: removed references to remote code from %s (%s); trust_remote_code keeps them",
        where,
        name,
        ", ".join(found),
    )
    return json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"


def _strip(value: Any, *, inside: bool) -> Iterator[str]:  # noqa: ANN401 - JSON
    """Remove references to remote code in place and yield each."""
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
    """Return whether a value contains nothing but nulls and empty containers."""
    if isinstance(value, dict | list):
        return all(_is_void(one) for one in (value.values() if isinstance(value, dict) else value))
    return value is None
