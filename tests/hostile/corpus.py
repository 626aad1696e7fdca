"""Every hostile object, by name."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from deltachain.errors import (
    BaseMismatchError,
    ChainMismatchError,
    DeltaChainError,
    DigestMismatchError,
    ForkedChainError,
    MalformedError,
    ObjectNotFoundError,
    TensorMismatchError,
    UnsupportedFormatError,
)
from tests.format.forge import KEYS, TABLES, enveloped, no_documents
from tests.hostile.parts import parts
from tests.hostile.scene import (
    ENVELOPES,
    RECORD,
    Case,
    Category,
    Level,
    Scene,
    case,
    edited,
    listed,
)

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
        yield chain_case("table", NO_TABLE.get(name, "another rule"), name, updating(fields))
    for category, name, edit in ROWS:
        yield chain_case("table", category, name, edit)
    for category, name, edit in MODELS:
        yield chain_case("table", category, name, edit, error=TensorMismatchError, at="")
    for category, name, edit in IDENTITIES:
        yield chain_case("chain", category, name, edit)
    for key in KEYS:
        yield chain_case(
            "chain", "path", f"a file at {key[:20]!r}, {len(key)} long", asset(key=key)
        )
    other: dict[str, Any] = {"error": DigestMismatchError, "at": "table"}
    edit = updating({"table": "0" * 64})
    yield chain_case("chain", "wrong digest", "another table", edit, **other)
    for category, name, act, error in FILES:
        yield case("chain", category, name, act, error=error, at="asset", assets=True, opens=True)
    for category, name, edit in HINTS:
        yield chain_case("head", category, name, edit, error=None, at="", scene=RECORD)


def chain_case(level: Level, category: Category, name: str, edit: Edit, **more: Any) -> Case:
    return case(level, category, name, edited(level, edit), opens=True, **more)


def updating(fields: Any) -> Edit:
    return lambda document: document.update(fields)


def cell(column: int, value: Any) -> Edit:
    """Change the name, the dtype or the shape of a table's tensor."""
    return lambda table: table["tensors"][0].__setitem__(column, value)


def asset(**fields: Any) -> Edit:
    return lambda identity: identity["assets"][0].update(fields)


def file(**fields: Any) -> Callable[[Scene], object]:
    return lambda scene: scene.edit("chain", asset(**fields))


def anchor(**fields: Any) -> Edit:
    summary = {"version": 1, "kind": "anchor", "base": None, "nbytes": 0, "parts": 0}
    summary |= {"encodings": [], "state": "0" * 32}
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
    ("wrong type", "a name that is no text", cell(0, 5)),
    ("wrong type", "a shape that is no list", cell(2, 8)),
    ("out of range", "65 dimensions", cell(2, [1] * 65)),
    ("out of range", "2^48 + 1 elements", cell(2, [(1 << 48) + 1])),
    ("out of range", "a dimension of 2^63", cell(2, [0, 1 << 63])),
    ("out of range", "a dimension of 4000 digits", cell(2, [10**4000])),
    ("lying size", "64 dimensions of 2^62", cell(2, [1 << 62] * 64)),
    ("bomb", "a million dimensions", cell(2, [1] * 1_000_000)),
    ("duplicate", "the tensor twice", lambda d: d.update(tensors=d["tensors"] * 2)),
    ("overlapping", "an alias of an alias", lambda d: d.update(aliases={"a": "w", "b": "a"})),
    ("path", "an alias of a file", lambda d: d.update(aliases={"a": "../../etc/passwd"})),
)

MODELS: Final[Rows] = (
    ("path", "a tensor of a system folder", cell(0, "/etc/passwd")),
    ("lying size", "a tensor of 2^48 elements", cell(2, [1 << 48])),
    ("lying size", "a tensor of no elements", cell(2, [1 << 62, 0])),
    ("wrong type", "another dtype", cell(1, "F16")),
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
        yield document_case(level, "wrong digest", name, spaced(level), error=DigestMismatchError)


def texts(level: Level) -> Iterator[Case]:
    for name in no_documents(SOUND):
        yield document_case(level, NAMED.get(name, "another rule"), name, text(level, name))
    for name, cut in CUTS.items():
        yield document_case(level, "truncated", name, cutting(level, cut))
    yield document_case(level, "bomb", "four million lists where anything goes", many_lists(level))


def fields(level: Level) -> Iterator[Case]:
    for category, name, edit in EDITS:
        yield document_case(level, category, name, edited(level, edit))
    for name, edit in NEWER.items():
        yield document_case(
            level, "requires", name, edited(level, edit), error=UnsupportedFormatError
        )
    for value in (-1, 1 << 63, 10**4000) if level in COUNTS else ():
        name = f"a count of {str(value)[:21]}"
        yield document_case(
            level, "out of range", name, edited(level, setting(COUNTS[level], value))
        )


def envelopes(level: Level) -> Iterator[Case]:
    for category, name, change in AROUND:
        yield document_case(level, category, name, around(level, change))
    yield document_case(
        level,
        "wrong digest",
        "another payload than was sealed",
        around(level, lambda data: data.replace(b'"format":1,', b'"format":1 ,')),
        error=DigestMismatchError,
    )


def document_case(
    level: Level,
    category: Category,
    name: str,
    act: Callable[[Scene], object],
    *,
    error: type[DeltaChainError] = MalformedError,
) -> Case:
    where: dict[str, Any] = {
        "scene": RECORD if level in ENVELOPES else "step",
        "opens": level not in ENVELOPES,
    }
    if level == "head":  # a hint that cannot be read is no error: there is a way without it
        return case(level, category, name, act, error=None, at="", **where)
    return case(level, category, name, act, error=error, **where)


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
    ("wrong type", "a payload that is no object", lambda _: enveloped(b"1")),
    ("another rule", "no envelope", lambda data: json.dumps(json.loads(data)["payload"]).encode()),
)


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


CORPUS: Final[tuple[Case, ...]] = (*parts(), *documents(), *edges(), *chains())
