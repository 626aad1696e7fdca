"""References to remote code, and pickled objects, in the assets of a checkpoint.

A chain carries no code, but ``auto_map`` may name a class in any repository, and loading the folder
with ``trust_remote_code=True`` fetches and runs it. A reference to a file beside the weights
(``modeling_x.X``) is kept, because a chain cannot deliver that file.
"""

import io
import json
import logging
import re
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import numpy as np

logger = logging.getLogger(__name__)

ELSEWHERE: Final = "--"  # separator between repository and class
_KERNEL: Final = "/"  # part of each name of a kernel on the Hub, and of no other implementation

POINTERS: Final = {"auto_map": ELSEWHERE, "custom_pipelines": ELSEWHERE}
"""Fields, at any depth, whose values refer to code, and what the texts have that do."""

_IMPLEMENTATION: Final = re.compile(r"\w*_implementation(_\w+)?")
"""Names of fields that choose kernels, of attention, experts or whatever comes."""

_ARRAY: Final = ".npy"

_HEADERS: Final = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
"""Readers of the header of an array's file, by version."""

ORIGINS: Final = ("_name_or_path", "name_or_path")  # say where an auto_map points
DEEPEST: Final = 100  # levels of nesting that are examined; a file with more is left out

CLASS_ELSEWHERE: Final = re.compile(r"(?!.*--.*--)[^\s]*/[^\s]*--[^\s.]+\.\w+")
"""A class in a repository or a folder; removed from any field, since a loader may run it."""

_MARKS: Final = (b"--", b"auto_map", b"_implementation", b"\\u", b"\0")
"""Bytes of which every reference has one: escapes and UTF-16 can spell the others."""


def without_remote_code(name: str, data: bytes, *, trusted: bool, where: str) -> bytes | None:
    """Remove references to remote code from an asset; return equal bytes if there are none.

    ``None`` if it must be left out: it may have pickled objects, or cannot be examined.
    ``_name_or_path`` goes with an ``auto_map``, which may name a module without its repository.
    """
    if name.endswith(_ARRAY) and not trusted and _is_pickled(data):
        logger.warning(
            "%s: left out %s, which may have pickled objects; trust_remote_code keeps it",
            where,
            name,
        )
        return None
    if trusted or not name.endswith(".json") or not any(mark in data for mark in _MARKS):
        return data
    repeated: list[str] = []
    try:
        document = json.loads(data, object_pairs_hook=partial(_last, repeated))
        found = [*_strip(document), *repeated]
        kept = json.dumps(document, indent=2, ensure_ascii=False).encode() if found else data
    except (ValueError, RecursionError) as exc:
        logger.warning(
            "%s: left out %s, which cannot be searched for references to remote code (%s); "
            "trust_remote_code keeps it",
            where,
            name,
            exc,
        )
        return None
    if not found:
        return kept
    logger.warning(
        "%s: removed references to remote code from %s (%s); trust_remote_code keeps them",
        where,
        name,
        ", ".join(found),
    )
    return kept + b"\n"


def bare(data: bytes) -> bytes:
    """Return a JSON document without references to remote code; anything else as it is."""
    try:
        document = json.loads(data)
        _strip(document)
    except (ValueError, RecursionError):
        return data
    return json.dumps(document).encode()


def _is_pickled(data: bytes) -> bool:
    """Return whether the file of an array may have more than numbers: unpickling may run code."""
    file = io.BytesIO(data)
    try:
        read = _HEADERS[np.lib.format.read_magic(file)]
        return read(file)[2].hasobject
    except Exception:  # noqa: BLE001 - of a parser of Python, on bytes that anyone may have written
        return True


def _last(repeated: list[str], fields: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(fields)
    if len(found) < len(fields):
        repeated.append("fields that occur twice")
    return found


def _strip(document: Any) -> list[str]:  # noqa: ANN401 - JSON
    found = []
    members = list(_members(document))
    for value, key, inner, mark in members:
        if isinstance(inner, str) and _names_code(inner, mark):
            found.append(inner)
            value[key] = None
    for value, key, _, mark in reversed(members):  # children before their parents
        if mark and isinstance(value, dict) and _is_void(value[key]):
            del value[key]
    if any(key == "auto_map" and key in value for value, key, _, _ in members):
        for value, key, inner, _ in members:
            if key in ORIGINS and isinstance(inner, str):
                found.append(f"{key}: {inner}")
                value.pop(key, None)
    return found


def _members(document: Any) -> Iterator[tuple[Any, Any, Any, str]]:  # noqa: ANN401 - JSON
    """Yield container, key, value, and the mark of the pointer around it; parents first."""
    stack = [(document, "", 1)]
    while stack:
        value, outer, depth = stack.pop()
        if depth > DEEPEST:
            raise ValueError(f"nested more than {DEEPEST} levels deep")
        items: list[tuple[Any, Any]] = []
        if isinstance(value, dict | list):
            items = list(value.items() if isinstance(value, dict) else enumerate(value))
        for key, inner in items:
            own = _KERNEL if _IMPLEMENTATION.fullmatch(str(key)) else POINTERS.get(key, "")
            mark = outer or own
            yield value, key, inner, mark
            if isinstance(inner, dict | list):
                stack.append((inner, mark, depth + 1))


def _names_code(text: str, mark: str) -> bool:
    return (mark != "" and mark in text) or CLASS_ELSEWHERE.fullmatch(text) is not None


def _is_void(value: Any) -> bool:  # noqa: ANN401 - JSON
    if isinstance(value, dict | list):
        return all(_is_void(one) for one in (value.values() if isinstance(value, dict) else value))
    return value is None
