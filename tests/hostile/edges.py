"""Hostile edges: manifests and edge records that are documents, and say what cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from deltachain.errors import (
    BaseMismatchError,
    ChainMismatchError,
    DeltaChainError,
    DigestMismatchError,
    ForkedChainError,
    MalformedError,
)
from tests.format.forge import KEYS
from tests.hostile.case import Case, Category, Level
from tests.hostile.scene import RECORD, Scene, listed

Edit = Callable[[Any], object]

ELSEWHERE: Final = f"edges/{0:020d}/anchor-nothing.json"
"""Where the record of another version would lie."""

OLDER: Final = f"deltas/{0:020d}-00000000-{1:032x}/00000.safetensors"
"""Where a part of version 0 lies."""


def edges() -> Iterator[Case]:
    yield from ways("manifest", "step")
    yield from ways("record", RECORD)
    for category, name, edit in MANIFESTS:
        yield case("manifest", category, name, edited("manifest", edit), scene=RECORD)
    for category, name, edit, error in HISTORIES:
        poisons = error is BaseMismatchError
        act = edited("manifest", edit)
        yield case("manifest", category, name, act, error=error, at="", poisons=poisons)
    for category, name, edit in RECORDS:
        yield case("record", category, name, edited("record", edit), scene=RECORD)
    for category, name, edit, error in LISTINGS:
        act = edited("manifest", of_listing(edit))
        yield case("record", category, name, act, error=error, scene=RECORD)


def ways(level: Level, scene: str) -> Iterator[Case]:
    for category, name, edit in EDGES:
        yield case(level, category, name, edited(level, of_edge(edit)), scene=scene)
    for key in KEYS:
        name = f"a part at {key[:20]!r}, {len(key)} long"
        yield case(level, "path", name, edited(level, of_edge(part(key=key))), scene=scene)
    for name, nbytes in LIES.items():
        act = edited(level, of_edge(part(nbytes=nbytes)))
        if level == "record":  # whose summary tells already
            yield case(level, "lying size", name, act, scene=scene)
        else:
            yield case(level, "lying size", name, act, at="part", scene=scene)


def case(
    level: Level,
    category: Category,
    name: str,
    act: Callable[[Scene], object],
    *,
    error: type[DeltaChainError] = MalformedError,
    at: Any = None,
    scene: str = "step",
    poisons: bool = False,
) -> Case:
    return Case(
        level=level,
        category=category,
        name=name,
        act=act,
        error=error,
        at=level if at is None else at,
        scene=scene,
        poisons=poisons,
    )


def edited(level: Level, edit: Edit) -> Callable[[Scene], object]:
    return lambda scene: scene.edit(level, edit)


def part(**fields: Any) -> Edit:
    return lambda edge: edge["parts"][0].update(fields)


def of_edge(edit: Edit) -> Edit:
    return lambda document: edit(document["edge"])


def of_listing(edit: Edit) -> Edit:
    return lambda manifest: edit(listed(manifest))


def recent(**fields: Any) -> Edit:
    return lambda manifest: manifest["recent"][0].update(fields)


def overlap(edge: Any) -> None:
    edge["parts"].append(edge["parts"][0] | {"nbytes": 1})


EDGES: Final[tuple[tuple[Category, str, Edit], ...]] = (
    ("wrong type", "a kind that nobody knows", lambda e: e.update(kind="sideways")),
    ("wrong type", "a kind that is no text", lambda e: e.update(kind=1)),
    ("wrong type", "parts that are no list", lambda e: e.update(parts={})),
    ("wrong type", "a part that is a key", lambda e: e.update(parts=["x"])),
    ("wrong type", "a length that is a text", part(nbytes="1")),
    ("wrong type", "a length that is a float", part(nbytes=1.5)),
    ("wrong type", "a digest that is no text", part(blake3=0)),
    ("wrong type", "encodings that are no list", lambda e: e.update(encodings="step")),
    ("out of range", "a base below zero", lambda e: e.update(kind="delta", base=-1)),
    ("out of range", "a base of a later version", lambda e: e.update(kind="delta", base=9)),
    ("out of range", "a base beyond 64 bits", lambda e: e.update(kind="delta", base=1 << 64)),
    ("out of range", "a skip from its own version", lambda e: e.update(kind="skip", base=1)),
    ("out of range", "a length below zero", part(nbytes=-1)),
    ("out of range", "a length beyond 63 bits", part(nbytes=1 << 63)),
    ("out of range", "a length of 4000 digits", part(nbytes=10**4000)),
    ("out of range", "a part of another version", part(key=OLDER)),
    ("out of range", "a part that is a manifest", part(key=f"manifests/{0:020d}.json")),
    ("path", "a part that is the table", part(key="table.json")),
    ("unsorted", "encodings in another order", lambda e: e.update(encodings=["step", "dense"])),
    ("duplicate", "an encoding twice", lambda e: e.update(encodings=["dense", "dense"])),
    ("duplicate", "a part twice", lambda e: e.update(parts=e["parts"] * 2)),
    ("overlapping", "the same part under two lengths", overlap),
    ("oversized", "ten thousand parts that are one", lambda e: e.update(parts=e["parts"] * 10_000)),
    ("truncated", "a part without its length", lambda e: e["parts"][0].pop("nbytes")),
    ("truncated", "a part without its digest", lambda e: e["parts"][0].pop("blake3")),
    ("truncated", "no kind", lambda e: e.pop("kind")),
    ("another rule", "a base without a reference", lambda e: e.update(kind="base", base=None)),
    ("another rule", "a reference of a delta", lambda e: e.update(reference={})),
    ("another rule", "a field of an edge that nobody knows", lambda e: e.update(colour="red")),
    ("another rule", "a field of a part that nobody knows", part(colour="red")),
)

LIES: Final[dict[str, int]] = {
    "a part of 2^62 bytes": 1 << 62,
    "a part of 2^63 - 1 bytes": (1 << 63) - 1,
    "a part of nothing": 0,
    "a part of one byte": 1,
}


MANIFESTS: Final[tuple[tuple[Category, str, Edit], ...]] = (
    ("overlapping", "a recent edge to its own version", recent(version=2)),
    ("overlapping", "a window that does not go back", lambda d: d.update(window_from=2)),
    ("out of range", "a window beyond 63 bits", lambda d: d.update(window_from=1 << 63)),
    ("out of range", "a recent edge to a later version", recent(version=(1 << 63) - 1)),
    ("out of range", "a recent edge of fewer than no parts", recent(parts=-1)),
    ("out of range", "a recent edge of fewer than no bytes", recent(nbytes=-(10**9))),
    ("unsorted", "recent edges in another order", lambda d: d["recent"].reverse()),
    ("path", "a record in a system folder", recent(record="../../etc/passwd")),
    ("path", "a record with a NUL", recent(record="edges/\0")),
    ("wrong type", "a state that is no text", lambda d: d.update(state=5)),
    ("wrong digest", "a state that is none", lambda d: d.update(state="z" * 32)),
    ("wrong digest", "a state that is short", lambda d: d.update(state="0" * 31)),
    ("out of range", "of another version", lambda d: d.update(version=3)),
    ("wrong type", "a time that is no number", lambda d: d.update(time="now")),
    ("wrong type", "metadata that are no texts", lambda d: d.update(metadata={"a": 1})),
)

HISTORIES: Final[tuple[tuple[Category, str, Edit, type[DeltaChainError]], ...]] = (
    ("wrong digest", "another parent", lambda d: d.update(parent="0" * 64), ForkedChainError),
    ("wrong digest", "no parent", lambda d: d.update(parent=""), ForkedChainError),
    ("wrong digest", "another state", lambda d: d.update(state="0" * 32), BaseMismatchError),
    ("another rule", "of another chain", lambda d: d.update(chain="f" * 32), ChainMismatchError),
)

RECORDS: Final[tuple[tuple[Category, str, Edit], ...]] = (
    ("wrong digest", "another state", lambda d: d.update(state="0" * 32)),
    ("wrong digest", "a state that is none", lambda d: d.update(state="../x")),
    ("wrong digest", "another manifest", lambda d: d.update(manifest="0" * 64)),
    ("out of range", "of another version", lambda d: d.update(version=0)),
    (
        "another rule",
        "another way to its version",
        lambda d: d["edge"].update(kind="delta", base=0),
    ),
    ("lying size", "fewer parts than are listed", lambda d: d["edge"].update(parts=[])),
    ("lying size", "encodings that are not listed", lambda d: d["edge"].update(encodings=["raw"])),
)

LISTINGS: Final[tuple[tuple[Category, str, Edit, type[DeltaChainError]], ...]] = (
    ("lying size", "is listed with 2^62 bytes", lambda e: e.update(nbytes=1 << 62), MalformedError),
    ("lying size", "is listed with no bytes", lambda e: e.update(nbytes=0), MalformedError),
    ("lying size", "is listed with 2^62 parts", lambda e: e.update(parts=1 << 62), MalformedError),
    ("lying size", "is listed with no parts", lambda e: e.update(parts=0), MalformedError),
    ("lying size", "is listed without encodings", lambda e: e.update(encodings=[]), MalformedError),
    (
        "wrong digest",
        "is listed with another state",
        lambda e: e.update(state="0" * 32),
        MalformedError,
    ),
    ("wrong digest", "another digest", lambda e: e.update(digest="0" * 64), DigestMismatchError),
    ("path", "is listed elsewhere", lambda e: e.update(record=ELSEWHERE), MalformedError),
)
