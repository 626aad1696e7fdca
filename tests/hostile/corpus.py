"""Every hostile object, by name."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from deltachain.codec import encode_part
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
from deltachain.types import TensorSpec
from tests.format.forge import KEYS, TABLES, Forgery, compress, enveloped, no_documents, take_apart
from tests.format.forgeries import FORGERIES, OLD, PARTS, forged
from tests.format.freeze import absolute
from tests.hostile.scene import (
    ENVELOPES,
    MAX,
    RECORD,
    Case,
    Category,
    Level,
    Scene,
    case,
    edited,
    listed,
    max_part,
)

Edit = Callable[[Any], object]
Act = Callable[[Scene], object]
Rows = tuple[tuple[Category, str, Edit], ...]
Acts = tuple[tuple[Category, str, Act], ...]

WRONG: Final[dict[str, Category]] = {
    "segments that overlap": "overlapping",
    "raw indices that descend": "unsorted",
    "very many dimensions": "oversized",
    "something behind it": "oversized",
    "a field twice": "duplicate",
    "a list": "wrong type",
}
"""What is wrong with a forgery, a table or a text; those that are not here break another rule."""


def chains() -> Iterator[Case]:
    for name, fields in TABLES.items():
        yield chain_case("table", WRONG.get(name, "another rule"), name, updating(fields))
    for category, name, edit in ROWS:
        yield chain_case("table", category, name, edit)
    for category, name, edit in MODELS:
        yield chain_case("table", category, name, edit, error=TensorMismatchError, at="")
    for category, name, edit in IDENTITIES:
        yield chain_case("chain", category, name, edit)
    for key in KEYS:
        name = f"a file at {key[:20]!r}, {len(key)} long"
        yield chain_case("chain", "path", name, asset(key=key))
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


def file(**fields: Any) -> Act:
    return lambda scene: scene.edit("chain", asset(**fields))


def anchor(**fields: Any) -> Edit:
    summary = {"version": 1, "kind": "anchor", "base": None, "nbytes": 0, "parts": 0}
    summary |= {"encodings": [], "state": "0" * 32}
    return lambda head: head.update(anchors=[summary | fields])


def anchors(count: int) -> Edit:
    return lambda head: (anchor()(head), head.update(anchors=head["anchors"] * count))


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

FILES: Final[tuple[tuple[Category, str, Act, type[DeltaChainError]], ...]] = (
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
    ("duplicate", "an anchor twice", anchors(2)),
    ("overlapping", "an anchor of the head", anchor(version=2)),
    ("oversized", "ten thousand anchors", anchors(10_000)),
    ("bomb", "anchors of 2^62 parts", anchor(parts=1 << 62)),
)


LEVELS: Final[Sequence[Level]] = ("manifest", "record", "table", "chain", "head")

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
        name, act = "a byte that nobody knows of", replacing(level, spaced)
        yield document_case(level, "wrong digest", name, act, error=DigestMismatchError)


def texts(level: Level) -> Iterator[Case]:
    for name in no_documents(SOUND):
        yield document_case(level, WRONG.get(name, "another rule"), name, text(level, name))
    for name, cut in CUTS.items():
        yield document_case(level, "truncated", name, cutting(level, cut))
    yield document_case(level, "bomb", "four million lists where anything goes", many_lists(level))


def fields(level: Level) -> Iterator[Case]:
    for category, name, edit in EDITS:
        yield document_case(level, category, name, edited(level, edit))
    for name, edit in NEWER.items():
        act = edited(level, edit)
        yield document_case(level, "requires", name, act, error=UnsupportedFormatError)
    for value in (-1, 1 << 63, 10**4000) if level in COUNTS else ():
        act = edited(level, updating({COUNTS[level]: value}))
        yield document_case(level, "out of range", f"a count of {str(value)[:21]}", act)


def envelopes(level: Level) -> Iterator[Case]:
    for category, name, change in AROUND:
        yield document_case(level, category, name, around(level, change))
    yield document_case(
        level,
        "wrong digest",
        "another payload than was sealed",
        around(level, spaced),
        error=DigestMismatchError,
    )


def document_case(
    level: Level,
    category: Category,
    name: str,
    act: Act,
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


def text(level: Level, name: str) -> Act:
    return lambda scene: scene.put_document(level, no_documents(scene.document(level))[name])


def many_lists(level: Level) -> Act:
    def act(scene: Scene) -> None:
        sound = scene.document(level)
        many = b'"ext":{"a":[' + b"[]," * 4_000_000 + b"[]]}"
        forged = sound.replace(b'"ext":{}', many, 1)
        assert forged != sound
        scene.put_document(level, forged)

    return act


def cutting(level: Level, cut: Callable[[bytes], bytes]) -> Act:
    return lambda scene: scene.put(level, cut(scene.read(level)))


def around(level: Level, change: Callable[[bytes], bytes]) -> Act:
    def act(scene: Scene) -> None:
        sound = scene.read(level)
        forged = change(sound)
        assert forged != sound
        scene.put(level, forged)

    return act


def replacing(level: Level, change: Callable[[bytes], bytes]) -> Act:
    return lambda scene: scene.replace(level, change(scene.read(level)))


def spaced(data: bytes) -> bytes:
    return data.replace(b'"format":1,', b'"format":1 ,')


def only(d: Any, name: str) -> None:
    for field in set(d) - {name}:
        del d[field]


CUTS: Final[dict[str, Callable[[bytes], bytes]]] = {
    "half": lambda data: data[: len(data) // 2],
    "all but the last byte": lambda data: data[:-1],
    "one byte": lambda data: data[:1],
}

EDITS: Final[Rows] = (
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

NEWER: Final[dict[str, Edit]] = {
    "an unknown feature": lambda d: d.update(requires=["ranks"]),
    "many unknown features": lambda d: d.update(requires=[str(n) for n in range(10_000)]),
    "a later format": lambda d: d.update(format=2),
    "a format of nothing": lambda d: d.update(format=0),
    "a later format and other fields": lambda d: d.update(format=2, colour="red"),
}

AROUND: Final[tuple[tuple[Category, str, Callable[[bytes], bytes]], ...]] = (
    ("duplicate", "signatures twice", lambda data: data[:-1] + b',"signatures":[]}'),
    ("another rule", "an unknown field of the envelope", lambda data: data[:-1] + b',"a":1}'),
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
    for category, name, edit in LISTINGS:
        act = edited("manifest", of_listing(edit))
        error = DigestMismatchError if name == "another digest" else MalformedError
        yield case("record", category, name, act, error=error, scene=RECORD)


def ways(level: Level, scene: str) -> Iterator[Case]:
    for category, name, edit in EDGES:
        yield case(level, category, name, edited(level, of_edge(edit)), scene=scene)
    for key in KEYS:
        name = f"a part at {key[:20]!r}, {len(key)} long"
        yield case(level, "path", name, edited(level, of_edge(part(key=key))), scene=scene)
    for name, nbytes in LIES.items():
        act = edited(level, of_edge(part(nbytes=nbytes)))
        at = "record" if level == "record" else "part"  # the summary of a record tells already
        yield case(level, "lying size", name, act, at=at, scene=scene)


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


EDGES: Final[Rows] = (
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


MANIFESTS: Final[Rows] = (
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

RECORDS: Final[Rows] = (
    ("wrong digest", "another state", lambda d: d.update(state="0" * 32)),
    ("wrong digest", "a state that is none", lambda d: d.update(state="../x")),
    ("wrong digest", "another manifest", lambda d: d.update(manifest="0" * 64)),
    ("out of range", "of another version", lambda d: d.update(version=0)),
    ("another rule", "another way to it", lambda d: d["edge"].update(kind="delta", base=0)),
    ("lying size", "fewer parts than are listed", lambda d: d["edge"].update(parts=[])),
    ("lying size", "encodings that are not listed", lambda d: d["edge"].update(encodings=["raw"])),
)

LISTINGS: Final[Rows] = (
    ("lying size", "is listed with 2^62 bytes", lambda e: e.update(nbytes=1 << 62)),
    ("lying size", "is listed with no bytes", lambda e: e.update(nbytes=0)),
    ("lying size", "is listed with 2^62 parts", lambda e: e.update(parts=1 << 62)),
    ("lying size", "is listed with no parts", lambda e: e.update(parts=0)),
    ("lying size", "is listed without encodings", lambda e: e.update(encodings=[])),
    ("wrong digest", "is listed with another state", lambda e: e.update(state="0" * 32)),
    ("wrong digest", "another digest", lambda e: e.update(digest="0" * 64)),
    ("path", "is listed elsewhere", lambda e: e.update(record=ELSEWHERE)),
)


COLUMNS: Final = ("start", "length", "nnz", "gaps", "exceptions", "wide")

LIMIT: Final = 1 << 26
"""Bytes that a directory may inflate to."""


def parts() -> Iterator[Case]:
    for name, (scene, _) in FORGERIES.items():
        wrong = WRONG.get(name, "another rule")
        yield case("part", wrong, name, put(partial(forged, name)), scene=scene)
    for category, name, act in (*CUT, *HUGE, *STRANGE):
        yield case("part", category, name, act)
    for name, edit in NEWER_PARTS.items():
        yield case("part", "requires", name, put(changed(edit)), error=UnsupportedFormatError)
    yield from tiles()
    for category, name, act in LYING:
        yield case("part", category, name, act)
    for category, name, act in UNPROVEN:
        yield case("part", category, name, act, error=DigestMismatchError)


def tiles() -> Iterator[Case]:
    for category, name, edit in TILES:
        yield case("part", category, name, put(partial(retiled, edit)), scene=MAX)
    for category, name, edit in TILE_BITS:
        spoilt: dict[str, Any] = {"error": BaseMismatchError, "at": "", "poisons": True}
        yield case("part", category, name, put(partial(retiled, edit)), scene=MAX, **spoilt)


def retiled(edit: Edit) -> bytes:
    forgery = take_apart(max_part())
    edit(forgery)
    return forgery.build()


def poke(f: Forgery, stream: str, at: int, value: int) -> None:
    data = bytearray(f.streams[stream])
    data[at] = value
    f.streams[stream] = bytes(data)


def alone(f: Forgery) -> None:
    f.rows[0]["gap"] = 0
    for at in (0, 5):
        poke(f, "#0.class", at, 3)


def resized(f: Forgery, more: int) -> None:
    data = f.streams["#0.tile"]
    f.streams["#0.tile"] = data[:more] if more < 0 else data + bytes(more)
    f.set_tile_nbytes(0, f.tile_nbytes(0) + more)


def long_names(f: Forgery) -> None:
    """Let each of many rows have all characters of a long name before it."""
    row = f.rows[0] | {"name": "0:" + "a" * (1 << 20), "segments": 0}
    f.rows[:0] = [row, *(row | {"name": f"{1 << 20}:{chr(0x4E00 + n)}"} for n in range(64))]


TILES: Final[Rows] = (
    ("lying size", "elements in a row of max", lambda f: f.rows[0].update(nnz=1)),
    ("another rule", "a digest left out", lambda f: f.rows[0].update(gap=0, digest="")),
    ("out of range", "a rate of a bin without old bits", alone),
    ("oversized", "more tiles than 64", lambda f: f.rows[0].update(gap=68)),
    ("another rule", "tiles that do not divide the columns", lambda f: f.rows[0].update(gap=3)),
    ("lying size", "a tile of too many bytes", lambda f: resized(f, 400)),
    ("out of range", "a tile of a negative size", lambda f: f.set_tile_nbytes(0, -1)),
    ("another rule", "a name that is not front coded", lambda f: f.rows[0].update(name="w")),
    ("out of range", "a prefix beyond the name before", lambda f: f.rows[0].update(name="1:w")),
    ("bomb", "names of terabytes", long_names),
)
TILE_BITS: Final[Rows] = (
    ("out of range", "a rate beyond 20", lambda f: poke(f, "#0.class", 0, 21)),
    ("out of range", "a size beyond 31", lambda f: poke(f, "#0.class", 256, 32)),
    ("truncated", "a tile that ends early", lambda f: resized(f, -1)),
    ("lying size", "a tile that ends late", lambda f: resized(f, 1)),
    ("out of range", "steps that are not canonical", lambda f: poke(f, "#0.tile", 0, 0xFF)),
)


def put(make: Callable[[], bytes]) -> Act:
    return lambda scene: scene.put("part", make())


def changed(edit: Edit) -> Callable[[], bytes]:
    def make() -> bytes:
        forgery = take_apart(PARTS["step"])
        edit(forgery)
        return forgery.build()

    return make


def columns(value: int) -> Edit:
    item = f"{value},".encode()
    count = (LIMIT - 4096) // (6 * len(item))

    def fill(document: bytes) -> bytes:
        head, rest = document.split(b'"segments":', 1)
        fields = (b'"%s":[%s]' % (name.encode(), (item * count)[:-1]) for name in COLUMNS)
        return head + b'"segments":{' + b",".join(fields) + rest[rest.index(b"}") :]

    return lambda f: setattr(f, "on_document", fill)


def blank(f: Forgery) -> None:
    f.on_document = lambda text: text + b" " * (LIMIT + 1 - len(text))


def long_frame(f: Forgery) -> None:
    """Frames that inflate to 64 MiB, and say so, where the directory says how little there is."""
    f.on_frame = lambda _: compress(bytes(1 << 26))


def other(name: str, dtype: str, *shape: int) -> Act:
    spec = TensorSpec(name, dtype, shape)

    def make() -> bytes:
        old = OLD.view(spec.bits_dtype)[: spec.numel]
        return encode_part([absolute(spec, old, old ^ old.dtype.type(1))]).data

    return put(make)


def head_of(length: int, data: bytes = PARTS["step"]) -> Act:
    return put(lambda: length.to_bytes(8, "little") + data[8:])


STEP: Final = PARTS["step"]
DIRECTORY_AT: Final = 8 + int.from_bytes(STEP[:8], "little")

CUT: Final[Acts] = (
    ("truncated", "nothing", put(lambda: b"")),
    ("truncated", "seven bytes", put(lambda: STEP[:7])),
    ("truncated", "the length of the header alone", put(lambda: STEP[:8])),
    ("truncated", "half the header", put(lambda: STEP[:300])),
    ("truncated", "half", put(lambda: STEP[: len(STEP) // 2])),
    ("truncated", "all but the last byte", put(lambda: STEP[:-1])),
    ("truncated", "one byte more", put(lambda: STEP + b"\0")),
    ("duplicate", "the file twice", put(lambda: STEP + STEP)),
)

HUGE: Final[Acts] = (
    ("oversized", "a header of 2^63 bytes", head_of(1 << 63)),
    ("oversized", "a header of 2^64 - 1 bytes", head_of((1 << 64) - 1)),
    ("oversized", "a header beyond the file", head_of(len(STEP) - 7)),
    ("oversized", "a header beyond the limit", head_of(100_000_001, bytes(100_000_010))),
    ("bomb", "a directory of 2^26 + 1 bytes", put(changed(blank))),
    ("bomb", "a directory of 2^26 bytes of zeros", put(changed(columns(0)))),
    ("bomb", "a directory of 2^26 bytes of ones", put(changed(columns(1)))),
    ("bomb", "a directory of 2^26 bytes of thousands", put(changed(columns(1000)))),
    ("bomb", "frames of 64 MiB", put(changed(long_frame))),
)

STRANGE: Final[Acts] = (
    ("wrong type", "another dtype than the table's", other("w", "F16", 2, 4)),
    ("wrong type", "another width than the table's", other("w", "U8", 2, 4)),
    ("out of range", "another shape than the table's", other("w", "BF16", 8)),
    ("out of range", "more elements than the table's", other("w", "U8", 4, 4)),
    ("path", "a tensor beside the chain", other("../w", "BF16", 2, 4)),
    ("path", "a tensor in a system folder", other("/etc/passwd", "BF16", 2, 4)),
    ("another rule", "an encoding that its edge does not list", put(lambda: PARTS["dense"])),
    ("another rule", "a part of another kind", put(lambda: b"PK\x03\x04" + bytes(100))),
    ("another rule", "a pickle", put(lambda: b"\x80\x04\x95" + bytes(100))),
)

NEWER_PARTS: Final[dict[str, Edit]] = {
    "a later format": lambda f: f.metadata.update(deltachain="2"),
    "another compression": lambda f: f.claims.update(compression="lz4"),
    "an unknown encoding": lambda f: f.rows[0].update(encoding="later"),
}


def reference(**fields: object) -> Act:
    return lambda scene: scene.edit("manifest", lambda d: d["edge"]["parts"][0].update(fields))


def flipped(data: bytes, at: int = -1) -> bytes:
    spoilt = bytearray(data)
    spoilt[at] ^= 1
    return bytes(spoilt)


UNPROVEN: Final[Acts] = (
    ("wrong digest", "a bit that nobody knows of", replacing("part", flipped)),
    ("wrong digest", "a bit of a frame", put(lambda: flipped(STEP))),
    ("wrong digest", "a bit of the directory", put(lambda: flipped(STEP, DIRECTORY_AT + 20))),
    ("wrong digest", "another blake3", reference(blake3="0" * 64)),
    ("wrong digest", "a blake3 that is none", reference(blake3="../x")),
    ("wrong digest", "another directory", reference(directory="0" * 64)),
    ("wrong digest", "no directory", reference(directory="")),
    ("wrong digest", "other bytes", replacing("part", lambda data: data[::-1])),
)

LYING: Final[Acts] = (
    ("wrong digest", "another part", replacing("part", lambda _: PARTS["dense"])),
    ("lying size", "a reference of 2^62 bytes", reference(nbytes=1 << 62)),
    ("lying size", "a reference of 2^63 - 1 bytes", reference(nbytes=(1 << 63) - 1)),
    ("lying size", "a reference of no bytes", reference(nbytes=0)),
    ("lying size", "a reference of one byte less", reference(nbytes=len(STEP) - 1)),
)


CORPUS: Final[tuple[Case, ...]] = (*parts(), *documents(), *edges(), *chains())
