"""Hostile identities, tables and hints: documents, and of no chain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from deltachain.errors import (
    DeltaChainError,
    DigestMismatchError,
    MalformedError,
    ObjectNotFoundError,
    TensorMismatchError,
)
from tests.format.forge import KEYS, TABLES
from tests.hostile.case import Case, Category, Level
from tests.hostile.scene import RECORD, Scene

Edit = Callable[[Any], object]
Rows = tuple[tuple[Category, str, Edit], ...]

NO_TABLE: Final[dict[str, Category]] = {
    "a name twice": "duplicate",
    "a dtype that has no wire form": "wrong type",
    "a dimension below zero": "out of range",
    "a huge tensor": "lying size",
    "very many dimensions": "oversized",
    "an alias that is a tensor": "overlapping",
}
"""Tables by what is wrong with them; those that are not here break another rule."""


def chains() -> Iterator[Case]:
    for name, fields in TABLES.items():
        category = NO_TABLE.get(name, "another rule")
        yield case("table", category, name, updating(fields))
    for category, name, edit in ROWS:
        yield case("table", category, name, edit)
    for category, name, edit in MODELS:
        yield case("table", category, name, edit, error=TensorMismatchError, at="")
    for category, name, edit in IDENTITIES:
        yield case("chain", category, name, edit)
    for key in KEYS:
        name = f"a file at {key[:20]!r}, {len(key)} long"
        yield case("chain", "path", name, asset(key=key))
    edit = updating({"table": "0" * 64})
    error = DigestMismatchError
    yield case("chain", "wrong digest", "another table", edit, error=error, at="table")
    yield from assets()
    for category, name, edit in HINTS:
        yield case("head", category, name, edit, error=None, at="", scene=RECORD)


def assets() -> Iterator[Case]:
    for category, name, act, error in FILES:
        yield Case(
            level="chain",
            category=category,
            name=name,
            act=act,
            error=error,
            at="asset",
            assets=True,
            opens=True,
        )


def case(
    level: Level,
    category: Category,
    name: str,
    edit: Edit,
    *,
    error: type[DeltaChainError] | None = MalformedError,
    at: Any = None,
    scene: str = "step",
) -> Case:
    return Case(
        level=level,
        category=category,
        name=name,
        act=lambda s: s.edit(level, edit),
        error=error,
        at=level if at is None else at,
        scene=scene,
        opens=True,
    )


def updating(fields: Any) -> Edit:
    return lambda document: document.update(fields)


def asset(**fields: Any) -> Edit:
    return lambda identity: identity["assets"][0].update(fields)


def file(**fields: Any) -> Callable[[Scene], object]:
    return lambda scene: scene.edit("chain", asset(**fields))


def anchor(**fields: Any) -> Edit:
    summary = {
        "version": 1,
        "kind": "anchor",
        "base": None,
        "nbytes": 0,
        "parts": 0,
        "encodings": [],
        "state": "0" * 32,
    }
    return lambda head: head.update(anchors=[summary | fields])


def two(identity: Any) -> None:
    first = identity["assets"][0]
    key = f"assets/{'0' * 32}/config.json"
    identity["assets"].append(first | {"key": key, "blake3": "0" * 64})


def deeper(identity: Any) -> None:
    ref = identity["assets"][0]
    ref.update(key=ref["key"].replace("config.json", "x/config.json"))


ROWS: Final[Rows] = (
    ("wrong type", "tensors that are no list", lambda d: d.update(tensors={})),
    ("wrong type", "a name that is no text", lambda d: d["tensors"][0].__setitem__(0, 5)),
    ("wrong type", "a shape that is no list", lambda d: d["tensors"][0].__setitem__(2, 8)),
    ("out of range", "65 dimensions", lambda d: d["tensors"][0].__setitem__(2, [1] * 65)),
    (
        "out of range",
        "2^48 + 1 elements",
        lambda d: d["tensors"][0].__setitem__(2, [(1 << 48) + 1]),
    ),
    ("out of range", "a dimension of 2^63", lambda d: d["tensors"][0].__setitem__(2, [0, 1 << 63])),
    (
        "out of range",
        "a dimension of 4000 digits",
        lambda d: d["tensors"][0].__setitem__(2, [10**4000]),
    ),
    (
        "lying size",
        "64 dimensions of 2^62",
        lambda d: d["tensors"][0].__setitem__(2, [1 << 62] * 64),
    ),
    ("bomb", "a million dimensions", lambda d: d["tensors"][0].__setitem__(2, [1] * 1_000_000)),
    ("duplicate", "the tensor twice", lambda d: d.update(tensors=d["tensors"] * 2)),
    ("overlapping", "an alias of an alias", lambda d: d.update(aliases={"a": "w", "b": "a"})),
    ("path", "an alias of a file", lambda d: d.update(aliases={"a": "../../etc/passwd"})),
)

MODELS: Final[Rows] = (
    (
        "path",
        "a tensor of a system folder",
        lambda d: d["tensors"][0].__setitem__(0, "/etc/passwd"),
    ),
    (
        "lying size",
        "a tensor of 2^48 elements",
        lambda d: d["tensors"][0].__setitem__(2, [1 << 48]),
    ),
    (
        "lying size",
        "a tensor of no elements",
        lambda d: d["tensors"][0].__setitem__(2, [1 << 62, 0]),
    ),
    ("wrong type", "another dtype", lambda d: d["tensors"][0].__setitem__(1, "F16")),
    ("another rule", "another tensor", lambda d: d.update(tensors=[["v", "BF16", [2, 4]]])),
    ("another rule", "a tensor more", lambda d: d["tensors"].append(["x", "U8", [1 << 40]])),
)
"""Tables that are sound, and not of the follower's model."""

IDENTITIES: Final[Rows] = (
    ("wrong type", "an id that is no text", lambda d: d.update(chain=7)),
    ("wrong type", "files that are no list", lambda d: d.update(assets={})),
    ("wrong type", "a time that is no number", lambda d: d.update(created="now")),
    ("out of range", "a file of fewer than no bytes", asset(nbytes=-1)),
    ("out of range", "a file of 2^63 bytes", asset(nbytes=1 << 63)),
    ("out of range", "a file of 4000 digits", asset(nbytes=10**4000)),
    ("duplicate", "a file twice", lambda d: d.update(assets=d["assets"] * 2)),
    ("overlapping", "two files of one name", two),
    ("oversized", "ten thousand files", lambda d: d.update(assets=d["assets"] * 10_000)),
    ("path", "a file that is a manifest", asset(key=f"manifests/{0:020d}.json")),
    ("path", "a file that is the table", asset(key="table.json")),
    ("path", "a file in another folder", asset(key=f"assets/{0:032x}/config.json")),
    ("path", "a file in a folder of a folder", deeper),
    ("wrong digest", "a digest that is not the key's", asset(blake3="0" * 64)),
)

FILES: Final[tuple[tuple[Category, str, Callable[[Scene], object], type[DeltaChainError]], ...]] = (
    ("lying size", "a small file of 2^62 bytes", file(nbytes=1 << 62), MalformedError),
    ("lying size", "a small file of no bytes", file(nbytes=0), MalformedError),
    (
        "wrong digest",
        "a small file of other bytes",
        lambda s: s.replace("asset", b" " * len(s.read("asset"))),
        DigestMismatchError,
    ),
    (
        "truncated",
        "a small file without its end",
        lambda s: s.replace("asset", s.read("asset")[:-1]),
        MalformedError,
    ),
    (
        "truncated",
        "a small file that is gone",
        lambda s: s.store.delete(s.keys["asset"]),
        ObjectNotFoundError,
    ),
)

HINTS: Final[Rows] = (
    ("out of range", "a version of 2^63 - 1", lambda d: d.update(version=(1 << 63) - 1)),
    ("lying size", "a version that is not there", lambda d: d.update(version=99)),
    ("lying size", "an older version", lambda d: d.update(version=0)),
    ("lying size", "an anchor that is free", anchor()),
    ("lying size", "an anchor of 2^63 - 1 bytes", anchor(nbytes=(1 << 63) - 1)),
    (
        "wrong digest",
        "an anchor whose record is not there",
        anchor(record=f"edges/{1:020d}/anchor-nothing.json"),
    ),
    ("path", "an anchor in a system folder", anchor(record="../../etc/passwd")),
    ("path", "an anchor that is the table", anchor(record="table.json")),
    ("duplicate", "an anchor twice", lambda d: (anchor()(d), d.update(anchors=d["anchors"] * 2))),
    ("overlapping", "an anchor of the head", anchor(version=2)),
    (
        "oversized",
        "ten thousand anchors",
        lambda d: (anchor()(d), d.update(anchors=d["anchors"] * 10_000)),
    ),
    ("bomb", "anchors of 2^62 parts", anchor(parts=1 << 62)),
)
