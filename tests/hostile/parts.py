"""Hostile parts: every forgery of the format tests, and those that only a follower can refuse."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from deltachain import errors
from deltachain.codec import encode_part
from deltachain.types import TensorSpec
from tests.format.forge import Forgery, compress, take_apart
from tests.format.forgeries import FORGERIES, OLD, PARTS, forged
from tests.format.freeze import absolute
from tests.hostile.scene import MAX, Case, Category, Scene, case, max_part

NAMED: Final[dict[Category, tuple[str, ...]]] = {
    "truncated": (
        *("a stream that is too short", "a stream that is missing"),
        *("a raw array that is missing", "a column that is shorter"),
        *("a plain directory of one byte less", "fewer gaps than elements"),
        "a front without its digest",
    ),
    "overlapping": (
        *("segments that overlap", "entries that overlap", "an array of two tensors"),
        *("a hole between entries", "an entry that goes backwards"),
    ),
    "oversized": (
        *("a frame that is too large", "a frame beyond the limit"),
        *("a segment that is too long", "a directory of a terabyte"),
        *("a directory of many digits", "very many dimensions"),
        *("an entry of very many dimensions", "a header nested deeply"),
        *("a directory nested deeply", "a number of many digits"),
    ),
    "out of range": (
        *("a start below zero", "a start that leaves the tensor", "a start beyond 64 bits"),
        *("a segment that leaves the tensor", "a gap that leaves the segment"),
        *("a gap that leaves the segment inside the tensor", "raw indices beyond the tensor"),
        *("raw indices below zero", "a bucket beyond 64 bits", "a dimension below zero"),
        *("a dimension beyond 64 bits", "dimensions with a huge product"),
        *("an entry beyond 64 bits", "an escape at the end"),
        "an escape in place of an element",
    ),
    "unsorted": ("raw indices that descend", "streams in another order"),
    "duplicate": (
        *("raw indices that repeat", "a row that is there twice"),
        *("a field that is there twice", "an entry that is there twice", "two frames in one"),
        "a directory of two frames",
    ),
    "wrong type": (
        *("a dtype that has no wire form", "a dtype of another width"),
        *("a shape that is no list", "a raw tensor of another dtype"),
        *("raw indices of another dtype", "a name that is no text", "a stream of signed bytes"),
        *("a number that is a float", "a number that is a truth", "metadata that are no texts"),
        "a directory that is no object",
    ),
    "bomb": (
        *("a frame that claims a terabyte", "a frame of unstated size"),
        *("a directory of unstated size", "a frame that may be skipped"),
    ),
    "lying size": (
        *("a frame of other length", "a frame of other content", "a huge number of elements"),
        *("segments that are not there", "a plain frame of other content"),
        *("frames of swapped lengths", "more elements than the segment is long"),
        *("a directory of one byte more", "an entry of other bytes"),
        "another number of elements",
    ),
}
"""Forgeries by what is wrong with them; those that are not here break another rule."""

COLUMNS: Final = ("start", "length", "nnz", "gaps", "exceptions", "wide")

LIMIT: Final = 1 << 26
"""Bytes that a directory may inflate to."""


def category_of(name: str) -> Category:
    return next((kind for kind, names in NAMED.items() if name in names), "another rule")


def parts() -> Iterator[Case]:
    for name, (scene, _) in FORGERIES.items():
        yield case("part", category_of(name), name, put(partial(forged, name)), scene=scene)
    for category, name, act in (*CUT, *HUGE, *STRANGE):
        yield case("part", category, name, act)
    for name, edit in NEWER.items():
        yield case(
            "part", "requires", name, put(changed(edit)), error=errors.UnsupportedFormatError
        )
    yield from tiles()
    for category, name, act in LYING:
        yield case("part", category, name, act)
    for category, name, act in UNPROVEN:
        yield case("part", category, name, act, error=errors.DigestMismatchError)


def tiles() -> Iterator[Case]:
    for category, name, edit in TABLES:
        yield case("part", category, name, put(partial(retiled, edit)), scene=MAX)
    for category, name, edit in BITS:
        spoilt: dict[str, Any] = {"error": errors.BaseMismatchError, "at": "", "poisons": True}
        yield case("part", category, name, put(partial(retiled, edit)), scene=MAX, **spoilt)


def retiled(edit: Callable[[Forgery], object]) -> bytes:
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


TABLES: Final[tuple[tuple[Category, str, Callable[[Forgery], object]], ...]] = (
    ("lying size", "elements in a row of max", lambda f: f.rows[0].update(nnz=1)),
    (
        "another rule",
        "a digest left without old bits",
        lambda f: f.rows[0].update(gap=0, digest=""),
    ),
    ("out of range", "a rate of a bin without old bits", alone),
    ("oversized", "more tiles than 64", lambda f: f.rows[0].update(gap=68)),
    ("another rule", "tiles that do not divide the columns", lambda f: f.rows[0].update(gap=3)),
    ("lying size", "a tile of too many bytes", lambda f: resized(f, 400)),
    ("out of range", "a tile of a negative size", lambda f: f.set_tile_nbytes(0, -1)),
    ("another rule", "a name that is not front coded", lambda f: f.rows[0].update(name="w")),
    ("out of range", "a prefix beyond the name before", lambda f: f.rows[0].update(name="1:w")),
    ("bomb", "names of terabytes", long_names),
)
BITS: Final[tuple[tuple[Category, str, Callable[[Forgery], object]], ...]] = (
    ("out of range", "a rate beyond 20", lambda f: poke(f, "#0.class", 0, 21)),
    ("out of range", "a size beyond 31", lambda f: poke(f, "#0.class", 256, 32)),
    ("truncated", "a tile that ends early", lambda f: resized(f, -1)),
    ("lying size", "a tile that ends late", lambda f: resized(f, 1)),
    ("out of range", "steps that are not canonical", lambda f: poke(f, "#0.tile", 0, 0xFF)),
)


def put(make: Callable[[], bytes]) -> Callable[[Scene], object]:
    return lambda scene: scene.put("part", make())


def changed(edit: Callable[[Forgery], object]) -> Callable[[], bytes]:
    def make() -> bytes:
        forgery = take_apart(PARTS["step"])
        edit(forgery)
        return forgery.build()

    return make


def columns(value: int) -> Callable[[Forgery], object]:
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


def other(spec: TensorSpec) -> bytes:
    old = OLD.view(spec.bits_dtype)[: spec.numel]
    return encode_part([absolute(spec, old, old ^ old.dtype.type(1))]).data


def smuggle(scene: Scene) -> None:
    scene.put("part", PARTS["dense"])


def head_of(data: bytes, length: int) -> bytes:
    return length.to_bytes(8, "little") + data[8:]


STEP: Final = PARTS["step"]

Rows = tuple[tuple[Category, str, Callable[[Scene], object]], ...]

CUT: Final[Rows] = (
    ("truncated", "nothing", put(lambda: b"")),
    ("truncated", "seven bytes", put(lambda: STEP[:7])),
    ("truncated", "the length of the header alone", put(lambda: STEP[:8])),
    ("truncated", "half the header", put(lambda: STEP[:300])),
    ("truncated", "half", put(lambda: STEP[: len(STEP) // 2])),
    ("truncated", "all but the last byte", put(lambda: STEP[:-1])),
    ("truncated", "one byte more", put(lambda: STEP + b"\0")),
    ("duplicate", "the file twice", put(lambda: STEP + STEP)),
)

HUGE: Final[Rows] = (
    ("oversized", "a header of 2^63 bytes", put(lambda: head_of(STEP, 1 << 63))),
    ("oversized", "a header of 2^64 - 1 bytes", put(lambda: head_of(STEP, (1 << 64) - 1))),
    ("oversized", "a header beyond the file", put(lambda: head_of(STEP, len(STEP) - 7))),
    (
        "oversized",
        "a header beyond the limit",
        put(lambda: head_of(bytes(100_000_010), 100_000_001)),
    ),
    ("bomb", "a directory of 2^26 + 1 bytes", put(changed(blank))),
    ("bomb", "a directory of 2^26 bytes of zeros", put(changed(columns(0)))),
    ("bomb", "a directory of 2^26 bytes of ones", put(changed(columns(1)))),
    ("bomb", "a directory of 2^26 bytes of thousands", put(changed(columns(1000)))),
    ("bomb", "frames of 64 MiB", put(changed(long_frame))),
)

STRANGE: Final[Rows] = (
    (
        "wrong type",
        "another dtype than the table's",
        put(lambda: other(TensorSpec("w", "F16", (2, 4)))),
    ),
    (
        "wrong type",
        "another width than the table's",
        put(lambda: other(TensorSpec("w", "U8", (2, 4)))),
    ),
    (
        "out of range",
        "another shape than the table's",
        put(lambda: other(TensorSpec("w", "BF16", (8,)))),
    ),
    (
        "out of range",
        "more elements than the table's",
        put(lambda: other(TensorSpec("w", "U8", (4, 4)))),
    ),
    ("path", "a tensor beside the chain", put(lambda: other(TensorSpec("../w", "BF16", (2, 4))))),
    (
        "path",
        "a tensor in a system folder",
        put(lambda: other(TensorSpec("/etc/passwd", "BF16", (2, 4)))),
    ),
    ("another rule", "an encoding that its edge does not list", smuggle),
    ("another rule", "a part of another kind", put(lambda: b"PK\x03\x04" + bytes(100))),
    ("another rule", "a pickle", put(lambda: b"\x80\x04\x95" + bytes(100))),
)

NEWER: Final[dict[str, Callable[[Forgery], object]]] = {
    "a later format": lambda f: f.metadata.update(deltachain="2"),
    "another compression": lambda f: f.claims.update(compression="lz4"),
    "an unknown encoding": lambda f: f.rows[0].update(encoding="later"),
}


def reference(**fields: object) -> Callable[[Scene], object]:
    return lambda scene: scene.edit("manifest", lambda d: d["edge"]["parts"][0].update(fields))


def flipped(scene: Scene) -> None:
    data = bytearray(scene.read("part"))
    data[-1] ^= 1
    scene.replace("part", bytes(data))


def flipped_frame(scene: Scene) -> None:
    data = bytearray(scene.read("part"))
    data[-1] ^= 1
    scene.put("part", bytes(data))


def flipped_front(scene: Scene) -> None:
    data = bytearray(scene.read("part"))
    data[8 + int.from_bytes(data[:8], "little") + 20] ^= 1
    scene.put("part", bytes(data))


UNPROVEN: Final[Rows] = (
    ("wrong digest", "a bit that nobody knows of", flipped),
    ("wrong digest", "a bit of a frame", flipped_frame),
    ("wrong digest", "a bit of the directory", flipped_front),
    ("wrong digest", "another blake3", reference(blake3="0" * 64)),
    ("wrong digest", "a blake3 that is none", reference(blake3="../x")),
    ("wrong digest", "another directory", reference(directory="0" * 64)),
    ("wrong digest", "no directory", reference(directory="")),
    ("wrong digest", "other bytes", lambda s: s.replace("part", s.read("part")[::-1])),
)

LYING: Final[Rows] = (
    ("wrong digest", "another part", lambda s: s.replace("part", PARTS["dense"])),
    ("lying size", "a reference of 2^62 bytes", reference(nbytes=1 << 62)),
    ("lying size", "a reference of 2^63 - 1 bytes", reference(nbytes=(1 << 63) - 1)),
    ("lying size", "a reference of no bytes", reference(nbytes=0)),
    ("lying size", "a reference of one byte less", reference(nbytes=len(STEP) - 1)),
)
