"""Takes a part to pieces and puts it together again, wrongly, with every digest right."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Any

import zstandard
from blake3 import blake3

MANY = b"9" * 10_000


def enveloped(payload: bytes, signatures: bytes = b"[]") -> bytes:
    digest = blake3(payload).hexdigest().encode()
    return b'{"blake3":"%s","payload":%s,"signatures":%s}' % (digest, payload, signatures)


def no_documents(data: bytes) -> dict[str, bytes]:
    deep = b"[" * 200_000 + b"]" * 200_000
    return {
        "nothing": b"",
        "something behind it": data + b"{}",
        "a byte order mark": b"\xef\xbb\xbf" + data,
        "another encoding": data.decode().encode("utf-16"),
        "no text": data.replace(b'"ext":{}', b'"ext":{"x":"\xff"}'),
        "no text in a name": data.replace(b'"ext":{}', b'"ext":{"\xff":1}'),
        "half a character": data.replace(b'"ext":{}', b'"ext":{"x":"\\ud800"}'),
        "no number": data.replace(b'"ext":{}', b'"ext":{"x":NaN}'),
        "a float beyond all": data.replace(b'"ext":{}', b'"ext":{"x":1e999}'),
        "a number of many digits": data.replace(b'"format":1', b'"format":' + b"1" * 100_000),
        "many digits where anything goes": data.replace(b'"ext":{}', b'"ext":{"x":' + MANY + b"}"),
        "a deep nest": deep,
        "a deep nest where anything goes": data.replace(b'"ext":{}', b'"ext":{"x":' + deep + b"}"),
        "a field twice": data.replace(b'"ext":{}', b'"ext":{},"ext":{}'),
        "a field twice where anything goes": data.replace(b'"ext":{}', b'"ext":{"a":1,"a":1}'),
        "a list": b"[]",
        "null": b"null",
    }


KEYS = (
    "/etc/passwd",
    "../x",
    "a/../b",
    ".hidden",
    "a//b",
    "a/",
    "a\n",
    "é",
    "a" * 256,
    "a b",
    "aaaa/" * 110 + "a",
)

TABLES: dict[str, dict[str, Any]] = {
    "a name twice": {"tensors": [["a", "F32", [1]], ["a", "F32", [2]]], "aliases": {}},
    "a dtype that has no wire form": {"tensors": [["a", "F4", [1]]], "aliases": {}},
    "a dimension below zero": {"tensors": [["a", "F32", [-1]]], "aliases": {}},
    "a huge tensor": {"tensors": [["a", "F32", [1 << 40, 1 << 40]]], "aliases": {}},
    "very many dimensions": {"tensors": [["a", "F32", [2**62] * 50_000]], "aliases": {}},
    "an alias of nothing": {"tensors": [["a", "F32", [1]]], "aliases": {"b": "c"}},
    "an alias that is a tensor": {"tensors": [["a", "F32", [1]]], "aliases": {"a": "a"}},
    "a row of two": {"tensors": [["a", "F32"]], "aliases": {}},
    "a row of four": {"tensors": [["a", "F32", [1], 0]], "aliases": {}},
}


Json = dict[str, Any]

FRAME = 1 << 20


def dumps(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def compress(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data)


def unsized(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1, write_content_size=False).compress(data)


@dataclass
class Forgery:
    """A part in pieces. Whoever edits them decides what the file says; digests are made to fit."""

    metadata: dict[str, str]
    rows: list[Json]
    segments: dict[str, list[int]]
    streams: dict[str, bytes]
    forms: dict[str, tuple[str, list[int]]]
    on_frame: Callable[[bytes], bytes] = lambda frame: frame
    on_directory: Callable[[Json], object] = lambda _: None
    on_document: Callable[[bytes], bytes] = lambda document: document
    on_stored: Callable[[bytes], bytes] = lambda stored: stored
    on_header: Callable[[Json], object] = lambda _: None
    on_front: Callable[[bytes], bytes] = lambda header: header
    claims: dict[str, str] = field(default_factory=dict)
    frame_nbytes: int = FRAME

    @property
    def zstd(self) -> bool:
        return self.metadata["compression"] == "zstd"

    def tile_nbytes(self, segment: int) -> int:
        """The size of a segment of ``max``, which is stored as a distance."""
        away, nnz = self.segments["gaps"][segment], self.segments["nnz"][segment]
        return nnz * 9 // 8 + (-(away + 1) // 2 if away % 2 else away // 2)

    def set_tile_nbytes(self, segment: int, nbytes: int) -> None:
        away = nbytes - self.segments["nnz"][segment] * 9 // 8
        self.segments["gaps"][segment] = 2 * away if away >= 0 else -2 * away - 1

    def names(self) -> list[str]:
        found = [""]
        for row in self.rows:
            shared, _, rest = row["name"].partition(":")
            is_short = row["encoding"] == "max"
            found.append(found[-1][: int(shared)] + rest if is_short else row["name"])
        return found[1:]

    def set_names(self, names: list[str]) -> None:
        for row, name, before in zip(self.rows, names, ["", *names], strict=False):
            shared = len(commonprefix((name, before)))  # noqa: RUF071 - characters, not paths
            row["name"] = f"{shared}:{name[shared:]}" if row["encoding"] == "max" else name

    def build(self) -> bytes:
        frames = {name: self.frames(data) for name, data in self.streams.items()}
        stored = self.directory(frames)
        shapes = [("directory", "U8", [len(stored)], len(stored)), ("digest", "U8", [32], 32)]
        for name, pieces in frames.items():
            size = sum(map(len, pieces))
            shapes.append((name, *self.forms.get(name, ("U8", [size])), size))
        header: Json = {"__metadata__": dict(sorted((self.metadata | self.claims).items()))}
        at = 0
        for name, dtype, shape, size in shapes:
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            at += size
        self.on_header(header)
        text = dumps(header)
        text = self.on_front(text + b" " * (-len(text) % 8))
        front = len(text).to_bytes(8, "little") + text + stored
        return front + blake3(front).digest() + b"".join(b"".join(p) for p in frames.values())

    def frames(self, data: bytes) -> list[bytes]:
        size = self.frame_nbytes
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        return [self.on_frame(compress(p) if self.zstd else p) for p in pieces]

    def directory(self, frames: dict[str, list[bytes]]) -> bytes:
        streams = []
        for name, pieces in frames.items():
            size = self.frame_nbytes
            left = [len(self.streams[name]) - n * size for n in range(len(pieces))]
            streams.append(
                {
                    "name": name,
                    "stored": [len(piece) for piece in pieces],
                    "raw": [min(size, n) for n in left],
                    "digests": [blake3(piece).hexdigest() for piece in pieces],
                }
            )
        document = {"tensors": self.rows, "segments": self.segments, "streams": streams}
        self.on_directory(document)
        text = dumps(document)
        text = self.on_document(text if self.zstd else text + b" " * (-len(text) % 8))
        self.metadata["directory_nbytes"] = str(len(text))
        return self.on_stored(compress(text) if self.zstd else text)


def take_apart(data: bytes) -> Forgery:
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    metadata = header.pop("__metadata__")
    zstd = metadata["compression"] == "zstd"

    def inflate(piece: bytes) -> bytes:
        return zstandard.ZstdDecompressor().decompress(piece) if zstd else piece

    def piece(name: str) -> bytes:
        first, last = header[name]["data_offsets"]
        return data[start + first : start + last]

    directory = json.loads(inflate(piece("directory")))
    streams = {}
    for row in directory["streams"]:
        left, whole = piece(row["name"]), b""
        for size in row["stored"]:
            whole, left = whole + inflate(left[:size]), left[size:]
        streams[row["name"]] = whole
    forms = {name: (header[name]["dtype"], header[name]["shape"]) for name in streams}
    return Forgery(
        metadata=metadata,
        rows=directory["tensors"],
        segments=directory["segments"],
        streams=streams,
        forms={} if zstd else forms,
    )
