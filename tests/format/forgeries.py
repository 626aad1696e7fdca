"""Ways to break the rules of FORMAT.md, one at a time, in parts that are sound otherwise."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import zstandard

from deltachain.codec import encode_part
from deltachain.types import TensorSpec
from tests.format.forge import Forgery, Json, compress, take_apart, unsized
from tests.format.freeze import absolute, dense, step, tiny_change
from tests.format.stranger import digest_of

SPEC = TensorSpec("w", "BF16", (2, 4))
OLD = np.arange(8, dtype=np.uint16) * np.uint16(0x1111)
NEW = OLD ^ np.array([1, 0, 0, 0x8000, 0, 6, 0, 0], np.uint16)
BYTE = TensorSpec("b", "U8", (4,))
ZEROS = TensorSpec("z", "U8", (10,))

PARTS = {
    "step": encode_part([tiny_change()]).data,
    "overwrite": encode_part([absolute(SPEC, OLD, NEW)]).data,
    "dense": encode_part([dense(SPEC, NEW)]).data,
    "raw": encode_part([absolute(SPEC, OLD, NEW)], raw=True).data,
    "plain": encode_part([dense(SPEC, NEW)], raw=True).data,
    "zeros": encode_part([dense(ZEROS, np.zeros(10, np.uint8))], raw=True).data,
    "bytes": encode_part(
        [step(BYTE, np.zeros(4, np.uint8), np.array([1, 100, 0, 156], np.uint8))]
    ).data,
}
"""The smallest part of each encoding, one of ten zeros and one of steps of 8 bits."""

Edit = Callable[[Forgery], object]


def row(field: str, value: Any) -> Edit:
    return lambda f: f.rows[0].update({field: value})


def column(field: str, *values: int) -> Edit:
    return lambda f: f.segments.update({field: list(values)})


def stream(name: str, data: bytes) -> Edit:
    return lambda f: f.streams.update({name: data})


def no_stream(name: str) -> Edit:
    return lambda f: f.streams.pop(name)


def hook(name: str, function: Callable[..., Any]) -> Edit:
    return lambda f: setattr(f, name, function)


def directory(function: Callable[[Json], object]) -> Edit:
    return hook("on_directory", function)


def header(function: Callable[[Json], object]) -> Edit:
    return hook("on_header", function)


def claim(**claims: str) -> Edit:
    return lambda f: f.claims.update(claims)


def both(*edits: Edit) -> Edit:
    def every(forgery: Forgery) -> None:
        for edit in edits:
            edit(forgery)

    return every


def words(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def rename(f: Forgery) -> None:
    f.streams = {name.replace("#0", "#1"): data for name, data in f.streams.items()}


def large_frame(f: Forgery) -> None:
    nbytes = (1 << 20) + 1
    f.frame_nbytes = 1 << 21
    f.rows[0].update(shape=[nbytes], nnz=nbytes, segments=2)
    f.segments.update(start=[0, 1 << 20], length=[1 << 20, 1], nnz=[1 << 20, 1])
    f.segments.update(gaps=[0, 0], exceptions=[0, 0], wide=[0, 0])
    f.streams = dict.fromkeys(f.streams, bytes(nbytes))


def overlap(f: Forgery) -> None:
    f.rows[0].update(segments=2)
    f.segments.update(start=[0, 0], length=[4, 4], nnz=[4, 4])
    f.segments.update(gaps=[0, 0], exceptions=[0, 0], wide=[0, 0])


def share(f: Forgery) -> None:
    f.rows.append(f.rows[0] | {"name": "w.values", "shape": [3], "encoding": "plain"})


def swap_lengths(f: Forgery) -> None:
    f.metadata["compression"] = "none"
    data = f.streams["#0.dense.0"]
    digests = [digest_of(data[:2]), digest_of(data[2:])]
    f.on_directory = lambda d: d["streams"][0].update(stored=[2, 6], raw=[6, 2], digests=digests)


def as_long_as_raw(f: Forgery) -> None:
    f.metadata["compression"] = "zstd"
    f.on_frame = lambda _: b"\x28\xb5\x2f\xfd\x20\x0a\x53\0\0\0"


def steps(sign: int, exception: int, magnitude: bytes, *wide: int) -> Edit:
    planes = np.array(wide, "<u2").view(np.uint8).reshape(-1, 2)
    edits = [column("exceptions", len(magnitude)), column("wide", len(wide))]
    contents = {
        "sign": bytes([sign]),
        "exception": bytes([exception]),
        "magnitude": magnitude,
        "wide.0": planes[:, 0].tobytes(),
        "wide.1": planes[:, 1].tobytes(),
    }
    for name, data in contents.items():
        edits.append(stream(f"#0.{name}", data) if data else no_stream(f"#0.{name}"))
    return both(*edits)


def halves(*exceptions: int) -> Edit:
    return both(
        row("segments", 2),
        column("start", 0, 2),
        column("length", 2, 2),
        column("nnz", 2, 1),
        column("gaps", 2, 1),
        column("exceptions", *exceptions),
        column("wide", 0, 0),
    )


def repeat_field(document: bytes) -> bytes:
    return document.replace(b'"gap":1,', b'"gap":1,"gap":1,')


def longer(field: str) -> Edit:
    return directory(lambda d: d["streams"][0][field].append(1 if field != "digests" else "0" * 64))


def first_stream(field: str, value: Any) -> Edit:
    return directory(lambda d: d["streams"][0].update({field: value}))


def entry(name: str, **fields: Any) -> Edit:
    return header(lambda h: h[name].update(fields))


OF_STEP: dict[str, Edit] = {
    "a start below zero": column("start", -1),
    "a start that leaves the tensor": column("start", 1),
    "a start beyond 64 bits": column("start", 1 << 64),
    "a segment of nothing": column("length", 0),
    "a segment that is too long": both(column("length", (1 << 20) + 1), row("shape", [1 << 21])),
    "a segment without elements": both(column("nnz", 0), row("nnz", 0)),
    "more elements than the segment is long": both(column("nnz", 9), row("nnz", 9)),
    "fewer gaps than elements": column("gaps", 3),
    "more gaps than fit": column("gaps", 5),
    "exceptions beyond the elements": column("exceptions", 5),
    "wide steps that are no exceptions": column("wide", 3),
    "a column that is shorter": column("wide"),
    "a segment that is nobody's": row("segments", 0),
    "segments that are not there": row("segments", 1 << 60),
    "another number of elements": row("nnz", 5),
    "a huge number of elements": row("nnz", 1 << 60),
    "gaps of no bytes": row("gap", 0),
    "gaps of three bytes": row("gap", 3),
    "a bucket that is not there": row("bucket", 1),
    "a bucket beyond 64 bits": row("bucket", 10**4000),
    "a dtype that has no wire form": row("dtype", "F4"),
    "a dtype of another width": row("dtype", "F32"),
    "a dimension below zero": row("shape", [-2, -4]),
    "a dimension beyond 64 bits": row("shape", [1 << 64]),
    "dimensions with a huge product": row("shape", [1 << 40, 1 << 40]),
    "very many dimensions": row("shape", [(1 << 63) - 1] * 100_000),
    "a shape that is no list": row("shape", 8),
    "a name that is no text": row("name", 8),
    "a digest that is none": row("digest", "z" * 32),
    "a digest that is short": row("digest", "0" * 31),
    "a field that nobody knows": row("colour", "red"),
    "a raw tensor in a compressed part": row("encoding", "raw"),
    "an encoding of other streams": row("encoding", "overwrite"),
    "a number that is a float": row("nnz", 4.0),
    "a number that is a truth": row("segments", True),
    "a gap that leaves the segment": stream("#0.gap8", b"\0\1\0\4"),
    "a gap that leaves the segment inside the tensor": column("length", 7),
    "an escape at the end": both(
        row("shape", [300]),
        column("length", 300),
        column("gaps", 5),
        stream("#0.gap8", b"\0\1\0\3\xff"),
    ),
    "an escape in place of an element": both(
        row("shape", [300]), column("length", 300), stream("#0.gap8", b"\0\1\xff\3")
    ),
    "a stream that is too long": stream("#0.magnitude", b"\3\xff\3"),
    "a stream that is too short": stream("#0.gap8", b"\0\1\0"),
    "a stream that is nobody's": stream("#0.value.0", b"\0"),
    "a stream that is missing": no_stream("#0.sign"),
    "a bucket's streams under another name": rename,
    "bits behind the last sign": stream("#0.sign", b"\x1a"),
    "bits behind the last exception": stream("#0.exception", b"\x1c"),
    "more exceptions than bits say": steps(0x0A, 0x04, b"\3\xff", 0x8000),
    "fewer exceptions than bits say": steps(0x0A, 0x0E, b"\3\xff", 0x8000),
    "an exception of one": steps(0x0A, 0x0C, b"\1\xff", 0x8000),
    "an exception of nothing": steps(0x0A, 0x0C, b"\0\xff", 0x8000),
    "a wide step that is not wide": steps(0x0A, 0x0C, b"\3\xff", 0x10000 - 254),
    "a wide step of one": steps(0x0A, 0x0C, b"\3\xff", 0xFFFF),
    "a wide step of nothing": steps(0x0A, 0x0C, b"\3\xff", 0),
    "a wide step of the other sign": steps(0x02, 0x0C, b"\3\xff", 0x8000),
    "fewer wide steps than magnitudes say": steps(0x0A, 0x0C, b"\xff\xff", 0x8000),
    "more wide steps than magnitudes say": steps(0x0A, 0x0C, b"\3\4", 0x8000),
    "another frame list": longer("stored"),
    "another list of lengths": longer("raw"),
    "another list of digests": longer("digests"),
    "a frame of other length": first_stream("stored", [11]),
    "a frame of nothing": first_stream("raw", [0]),
    "a frame beyond the limit": first_stream("raw", [(1 << 20) + 1]),
    "a frame of other content": first_stream("raw", [2]),
    "streams in another order": directory(lambda d: d["streams"].reverse()),
    "white space in the directory": hook("on_document", lambda t: t + b" "),
    "a field that is there twice": hook("on_document", repeat_field),
    "a directory that is no object": hook("on_document", lambda _: b"[]"),
    "a directory that is no text": hook("on_document", lambda _: b'{"tensors":"\xff"}'),
    "a directory nested deeply": hook("on_document", lambda _: b"[" * 200_000),
    "a number of many digits": hook(
        "on_document", lambda t: re.sub(rb'"nnz":4', b'"nnz":' + b"9" * 10_000, t, count=1)
    ),
    "a directory of a terabyte": claim(directory_nbytes=str(1 << 40)),
    "a directory of one byte more": claim(directory_nbytes="1003"),
    "a directory below zero": claim(directory_nbytes="-1"),
    "a directory of many digits": claim(directory_nbytes="9" * 100_000),
    "a directory in other digits": claim(directory_nbytes="٣"),
    "a directory with a zero in front": claim(directory_nbytes="01002"),
    "no number of the format": lambda f: f.metadata.pop("deltachain"),
    "a directory of unstated size": hook("on_stored", lambda _: unsized(b"{}")),
    "a directory of two frames": hook("on_stored", lambda s: s + compress(b"")),
    "a directory that is no frame": hook("on_stored", lambda s: b"\0" * len(s)),
    "a frame of unstated size": hook(
        "on_frame", lambda s: unsized(zstandard.ZstdDecompressor().decompress(s))
    ),
    "a frame with something behind it": hook("on_frame", lambda s: s + b"\0"),
    "two frames in one": hook("on_frame", lambda s: s + s),
    "a frame that may be skipped": hook("on_frame", lambda _: b"\x50\x2a\x4d\x18\4\0\0\0abcd"),
    "a frame that claims a terabyte": hook(
        "on_frame", lambda _: b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little")
    ),
    "spaces in the header": hook("on_front", lambda t: t + b" " * 8),
    "an entry that is there twice": hook(
        "on_front",
        lambda t: t[:1] + b'"digest":{"dtype":"U8","shape":[],"data_offsets":[0,1]},' + t[1:],
    ),
    "a header nested deeply": hook(
        "on_front", lambda _: b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    ),
    "a header that is no text": hook("on_front", lambda _: b'{"\xff":1}'),
    "a header that is no object": hook("on_front", lambda _: b"[]"),
    "a header with half a character": hook("on_front", lambda _: b'{"\\ud800":1}'),
    "metadata that are no texts": entry("__metadata__", a=1),
    "an entry of a dtype that has no wire form": entry("digest", dtype="F4"),
    "an entry of other bytes": entry("digest", shape=[31]),
    "an entry of very many dimensions": entry("digest", shape=[(1 << 63) - 1] * 300_000),
    "an entry of a dimension below zero": entry("digest", shape=[-4, -8]),
    "an entry beyond 64 bits": entry("digest", data_offsets=[10**4200, 10**4200 + 32]),
    "entries that overlap": entry("#0.sign", data_offsets=[0, 10]),
    "a hole between entries": header(
        lambda h: h["#0.wide.1"].update(
            data_offsets=[n + 1 for n in h["#0.wide.1"]["data_offsets"]]
        )
    ),
    "an entry that goes backwards": entry("#0.sign", data_offsets=[9, 1]),
    "an entry with a field that nobody knows": entry("digest", a=1),
    "a stream in two dimensions": entry("#0.sign", shape=[5, 2]),
    "a stream of no dimensions": both(
        lambda f: f.metadata.update(compression="none"), entry("#0.sign", shape=[])
    ),
    "a stream of signed bytes": entry("#0.sign", dtype="I8"),
    "a digest of signed bytes": entry("digest", dtype="I8"),
    "a digest in two dimensions": entry("digest", shape=[4, 8]),
    "a directory of signed bytes": entry("directory", dtype="I8"),
    "a front without its digest": header(lambda h: h.update(hash=h.pop("digest"))),
}

OF_OTHERS: dict[str, tuple[str, Edit]] = {
    "a segment that leaves the tensor": ("dense", column("length", 9)),
    "a dense segment with fewer elements": ("dense", both(column("nnz", 7), row("nnz", 7))),
    "exceptions that are no steps": ("overwrite", column("exceptions", 1)),
    "wide steps that are no steps": ("overwrite", column("wide", 1)),
    "gaps where there are none": ("dense", column("gaps", 1)),
    "segments that overlap": ("dense", overlap),
    "gaps of a dense tensor": ("dense", row("gap", 1)),
    "a bucket of a raw tensor": ("raw", row("bucket", 1)),
    "a raw tensor of another dtype": ("raw", row("dtype", "F16")),
    "a plain tensor of another shape": ("plain", row("shape", [4, 2])),
    "an array of two tensors": ("raw", share),
    "a plain tensor that looks compressed": ("zeros", as_long_as_raw),
    "a row that is there twice": ("plain", lambda f: f.rows.append(f.rows[0])),
    "raw indices that descend": ("raw", stream("w.indices", words(3, 0, 5))),
    "raw indices that repeat": ("raw", stream("w.indices", words(0, 3, 3))),
    "raw indices beyond the tensor": ("raw", stream("w.indices", words(0, 3, 8))),
    "raw indices below zero": ("raw", stream("w.indices", words(-1, 3, 5))),
    "a stream that is empty": ("overwrite", stream("#0.sign", b"")),
    "a raw array that is missing": ("raw", no_stream("w.values")),
    "exceptions of another segment": ("bytes", halves(2, 0)),
    "a byte that goes up too far": ("bytes", stream("#0.magnitude", b"\x80\x64")),
    "a byte that goes down too far": ("bytes", stream("#0.magnitude", b"\x64\x81")),
    "a byte's step beyond a byte": (
        "bytes",
        both(stream("#0.magnitude", b"\x64\xff"), column("wide", 1), stream("#0.wide.0", b"\x9c")),
    ),
    "frames of swapped lengths": ("dense", swap_lengths),
    "a frame that is too large": ("dense", large_frame),
    "a plain frame of other content": ("plain", first_stream("raw", [15])),
    "a plain directory of one byte less": ("plain", claim(directory_nbytes="1")),
    "raw indices of another dtype": ("raw", entry("w.indices", dtype="U32")),
}

FORGERIES = {name: ("step", edit) for name, edit in OF_STEP.items()} | OF_OTHERS


def forged(name: str) -> bytes:
    part, edit = FORGERIES[name]
    forgery = take_apart(PARTS[part])
    edit(forgery)
    return forgery.build()
