"""Hostile documents at every level that has one: no JSON, other JSON, and another's digest."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from deltachain.errors import (
    DeltaChainError,
    DigestMismatchError,
    MalformedError,
    UnsupportedFormatError,
)
from tests.format.forge import enveloped, no_documents
from tests.hostile.case import Case, Category, Level
from tests.hostile.scene import ENVELOPES, RECORD, Scene

LEVELS: Final[Sequence[Level]] = ("manifest", "record", "table", "chain", "head")

NAMED: Final[dict[str, Category]] = {
    "nothing": "truncated",
    "something behind it": "oversized",
    "a number of many digits": "bomb",
    "many digits where anything goes": "bomb",
    "a deep nest": "bomb",
    "a deep nest where anything goes": "bomb",
    "a float beyond all": "out of range",
    "a field twice": "duplicate",
    "a field twice where anything goes": "duplicate",
    "a list": "wrong type",
    "null": "wrong type",
}
"""Texts by what is wrong with them; those that are not here break another rule."""

SOUND: Final = b'{"format":1,"ext":{}}'

UNSEALED: Final[Sequence[Level]] = ("table", "record")
"""Levels that are named by the digest of their bytes."""

COUNTS: Final[dict[Level, str]] = {"manifest": "nnz", "record": "version", "head": "version"}
"""A field of each level that is a count, where there is one at the top."""


def documents() -> Iterator[Case]:
    for level in LEVELS:
        yield from texts(level)
        yield from fields(level)
        if level in ENVELOPES:
            yield from envelopes(level)
    for level in UNSEALED:
        name = "a byte that nobody knows of"
        yield case(level, "wrong digest", name, spaced(level), error=DigestMismatchError)


def texts(level: Level) -> Iterator[Case]:
    for name in no_documents(SOUND):
        yield case(level, NAMED.get(name, "another rule"), name, text(level, name))
    for name, cut in CUTS.items():
        yield case(level, "truncated", name, cutting(level, cut))
    yield case(level, "bomb", "four million lists where anything goes", many_lists(level))


def fields(level: Level) -> Iterator[Case]:
    for category, name, edit in EDITS:
        yield case(level, category, name, edited(level, edit))
    for name, edit in NEWER.items():
        yield case(level, "requires", name, edited(level, edit), error=UnsupportedFormatError)
    for value in (-1, 1 << 63, 10**4000) if level in COUNTS else ():
        name = f"a count of {str(value)[:21]}"
        yield case(level, "out of range", name, edited(level, setting(COUNTS[level], value)))


def envelopes(level: Level) -> Iterator[Case]:
    for category, name, change in AROUND:
        yield case(level, category, name, around(level, change))
    yield case(
        level,
        "wrong digest",
        "another payload than was sealed",
        around(level, lambda data: data.replace(b'"format":1,', b'"format":1 ,')),
        error=DigestMismatchError,
    )


def case(
    level: Level,
    category: Category,
    name: str,
    act: Callable[[Scene], object],
    *,
    error: type[DeltaChainError] = MalformedError,
) -> Case:
    """A hint that cannot be read is no error: there is a way without it."""
    return Case(
        level=level,
        category=category,
        name=name,
        act=act,
        error=None if level == "head" else error,
        at="" if level == "head" else level,
        scene=RECORD if level in ENVELOPES else "step",
        opens=level not in ENVELOPES,
    )


def text(level: Level, name: str) -> Callable[[Scene], object]:
    return lambda scene: scene.put_document(level, no_documents(scene.document(level))[name])


def many_lists(level: Level) -> Callable[[Scene], object]:
    def act(scene: Scene) -> None:
        sound = scene.document(level)
        many = b'"ext":{"a":[' + b"[]," * 4_000_000 + b"[]]}"
        forged = sound.replace(b'"ext":{}', many, 1)
        assert forged != sound
        scene.put_document(level, forged)

    return act


def edited(level: Level, edit: Callable[[Any], object]) -> Callable[[Scene], object]:
    return lambda scene: scene.edit(level, edit)


def cutting(level: Level, cut: Callable[[bytes], bytes]) -> Callable[[Scene], object]:
    return lambda scene: scene.put(level, cut(scene.read(level)))


def around(level: Level, change: Callable[[bytes], bytes]) -> Callable[[Scene], object]:
    def act(scene: Scene) -> None:
        sound = scene.read(level)
        forged = change(sound)
        assert forged != sound
        scene.put(level, forged)

    return act


def spaced(level: Level) -> Callable[[Scene], object]:
    return lambda scene: scene.replace(
        level, scene.read(level).replace(b'"format":1,', b'"format":1 ,')
    )


def setting(field: str, value: Any) -> Callable[[Any], object]:
    return lambda document: document.update({field: value})


def only(d: Any, name: str) -> None:
    for field in set(d) - {name}:
        del d[field]


CUTS: Final[dict[str, Callable[[bytes], bytes]]] = {
    "half": lambda data: data[: len(data) // 2],
    "all but the last byte": lambda data: data[:-1],
    "one byte": lambda data: data[:1],
}

EDITS: Final[tuple[tuple[Category, str, Callable[[Any], object]], ...]] = (
    ("wrong type", "a format that is a text", lambda d: d.update(format="1")),
    ("wrong type", "a format that is a float", lambda d: d.update(format=1.5)),
    ("wrong type", "a format that is a truth", lambda d: d.update(format=True)),
    ("wrong type", "requirements that are no list", lambda d: d.update(requires={})),
    ("wrong type", "an ext that is no object", lambda d: d.update(ext=[])),
    ("another rule", "no format", lambda d: d.pop("format")),
    ("another rule", "nothing but a format", lambda d: only(d, "format")),
    ("another rule", "a field that nobody knows", lambda d: d.update(colour="red")),
    ("path", "a field of a system folder", lambda d: d.update({"../../etc/passwd": ""})),
)

NEWER: Final[dict[str, Callable[[Any], object]]] = {
    "an unknown feature": lambda d: d.update(requires=["ranks"]),
    "many unknown features": lambda d: d.update(requires=[str(n) for n in range(10_000)]),
    "a later format": lambda d: d.update(format=2),
    "a format of nothing": lambda d: d.update(format=0),
    "a later format and other fields": lambda d: d.update(format=2, colour="red"),
}

AROUND: Final[tuple[tuple[Category, str, Callable[[bytes], bytes]], ...]] = (
    ("duplicate", "signatures twice", lambda data: data[:-1] + b',"signatures":[]}'),
    (
        "another rule",
        "a field of the envelope that nobody knows",
        lambda data: data[:-1] + b',"a":1}',
    ),
    ("another rule", "white space behind the envelope", lambda data: data + b" "),
    ("wrong type", "an envelope that is no object", lambda _: b"[]"),
    (
        "wrong type",
        "a payload that is no object",
        lambda _: enveloped(b"1"),
    ),
    ("another rule", "no envelope", lambda data: json.dumps(json.loads(data)["payload"]).encode()),
)
