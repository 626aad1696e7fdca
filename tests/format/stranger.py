"""A reader of parts made from FORMAT.md alone: it shares no code with deltachain.

It holds numbers in plain lists and is slow. What it cannot read, the page does not say.
"""

import json
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import zstandard
from blake3 import blake3

U64: Final = (1 << 64) - 1


class RefusedError(Exception):
    """The bytes are not what FORMAT.md says."""


class UnsupportedError(RefusedError):
    """They may be what a later FORMAT.md says."""


def require(condition: object, why: str) -> None:
    if not condition:
        raise RefusedError(why)


def digest_of(data: bytes) -> str:
    return blake3(data).hexdigest()


# Section 6


def tensor_key(name: str, dtype: str, shape: Sequence[int]) -> tuple[int, int]:
    text = " ".join((dtype, ",".join(str(dim) for dim in shape), name))
    h = blake3(text.encode()).digest()
    return int.from_bytes(h[:8], "little"), int.from_bytes(h[8:16], "little")


def mix(key: int, i: int, b: int) -> int:
    x = ((key + i * 0x9E3779B97F4A7C15) & U64) ^ b
    x = x * 0xD6E8FEB86659FD93 & U64
    x ^= x >> 32
    x = x * 0xA0761D6478BD642F & U64
    return x ^ x >> 29


def state_text(lanes: Sequence[int]) -> str:
    return "".join(f"{lane & U64:016x}" for lane in lanes)


def tensor_lanes(name: str, dtype: str, shape: Sequence[int], bits: Sequence[int]) -> list[int]:
    keys = tensor_key(name, dtype, shape)
    return [sum(mix(key, i, b) for i, b in enumerate(bits)) for key in keys]


# Section 2: strict JSON


def read_json(data: bytes) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        require(len(dict(items)) == len(items), "a field is there twice")
        return dict(items)

    def constant(text: str) -> None:
        raise RefusedError(f"{text} is not JSON")

    try:
        text = data.decode("utf-8")
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError) as exc:
        raise RefusedError(str(exc)) from exc


def write_json(document: object) -> bytes:
    try:
        return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as exc:
        raise RefusedError("half a character") from exc


def is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def check_fields(document: Any, fields: Mapping[str, type]) -> None:
    """All fields in order, of their types; integers are sizes."""
    require(isinstance(document, dict) and list(document) == list(fields), "other fields")
    for name, kind in fields.items():
        value = document[name]
        require(is_size(value) if kind is int else isinstance(value, kind), f"{name}: type")


def check_sizes(values: Any, what: str) -> None:
    require(isinstance(values, list) and all(map(is_size, values)), what)


BINS: Final = {"BF16": (7, 255), "F16": (10, 31), "F32": (23, 255), "F64": (55, 255)}


class Bits:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> int:
        require(self.at + count <= 8 * len(self.data), "a tile ends early")
        bits = range(self.at, self.at + count)
        self.at += count
        return sum((self.data[n // 8] >> n % 8 & 1) << n - bits.start for n in bits)

    def ones(self, most: int) -> int:
        count = 0
        while count < most and self.take(1):
            count += 1
        return count

    def finish(self) -> None:
        left = 8 * len(self.data) - self.at
        require(left < 8 and self.take(left) == 0, "a tile is too long")


def bin_of(row: dict[str, Any], width: int, bits: int) -> int:
    shift, mask = BINS.get(row["dtype"], (0, 255 if width == 1 else 0))
    return bits >> shift & mask if row["gap"] else 0


def read_class(row: dict[str, Any], width: int, data: bytes) -> tuple[bytes, bytes]:
    rates, sizes = data[:256], data[256:]
    last = bin_of(row, width, (1 << 8 * width) - 1)
    for number, (rate, size) in enumerate(zip(rates, sizes, strict=True)):
        require(rate == 255 or (rate <= 20 and number <= last), "rate")
        require(size == 255 or (size <= 31 and rate != 255), "size")
    return rates, sizes


def tiles_of(row: dict[str, Any], segment: dict[str, int]) -> list[list[int]]:
    """Flat indices of the elements of each tile."""
    first, stop, count = segment["start"], segment["start"] + segment["length"], row["gap"]
    if count < 2:
        return [list(range(first, stop))]
    columns = row["shape"][-1]
    width = columns // count
    return [
        [n for n in range(first, stop) if n % columns // width == tile] for tile in range(count)
    ]


def split(data: bytes, count: int) -> Iterator[bytes]:
    sizes = []
    for _ in range(count - 1):
        size, n = 0, 0
        while True:
            require(len(data) > 0 and n < 4, "sizes of tiles")
            size |= (data[0] & 127) << 7 * n
            more, is_zero, data, n = data[0] > 127, data[0] == 0, data[1:], n + 1
            if not more:
                break
        require(n == 1 or not is_zero, "sizes of tiles")
        sizes.append(size)
    for size in sizes:
        require(size <= len(data), "sizes of tiles")
        yield data[:size]
        data = data[size:]
    yield data


def read_tile(
    row: dict[str, Any],
    width: int,
    tables: tuple[bytes, bytes],
    there: Sequence[tuple[int, int]],
    data: bytes,
) -> Iterator[tuple[int, int]]:
    """Index and step of the changed elements of a tile, from index and old bits of all."""
    bits, (rates, sizes) = Bits(data), tables
    classes = [
        (rate, [one for one in there if rates[bin_of(row, width, one[1])] == rate])
        for rate in sorted(set(rates) - {255})
    ]
    number, at = 0, 0
    while number < len(classes):
        rate, mine = classes[number]
        if at >= len(mine):
            number, at = following(classes, number, at)
        elif bits.take(1):
            at += 1 << rate
        else:
            at += bits.take(rate)
            while at >= len(classes[number][1]):
                require(number + 1 < len(classes), "a rank leaves the tile")
                more = classes[number + 1][0] - classes[number][0]
                number, at = following(classes, number, at)
                at += bits.take(more)
            index, old = classes[number][1][at]
            yield index, read_step(bits, sizes[bin_of(row, width, old)], 8 * width)
            at += 1
    bits.finish()


def following(classes: Sequence[tuple[int, Sized]], number: int, at: int) -> tuple[int, int]:
    """The next class, and the place in it of one behind a class."""
    at -= len(classes[number][1])
    if number + 1 < len(classes):
        at <<= classes[number + 1][0] - classes[number][0]
    return number + 1, at


def read_step(bits: Bits, size: int, width: int) -> int:
    sign, less = bits.take(1), 0
    if size != 255:
        quotient = bits.ones(24)
        if quotient < 24:
            less = (quotient << size) + bits.take(size)
        else:
            less = bits.take(width)
            require(less >= 24 << size, "steps are not canonical")
    step = (1 << width) - less - 1 if sign else less + 1
    require(0 < step < 1 << width and step >> width - 1 == sign, "steps are not canonical")
    return step


def read_tiles(
    row: dict[str, Any],
    width: int,
    segments: Sequence[dict[str, int]],
    data: tuple[bytes, Sequence[bytes]],
    old: Sequence[int],
) -> tuple[list[int], list[int]]:
    """Indices and steps of a tensor, from its ``class`` and the bytes of each segment."""
    found: list[tuple[int, int]] = []
    tables = read_class(row, width, data[0])
    for segment, mine in zip(segments, data[1], strict=True):
        before = len(found)
        tiles = zip(tiles_of(row, segment), split(mine, row["gap"]), strict=True)
        for places, tile in tiles:
            there = [(n, old[n] if row["gap"] else 0) for n in places]
            found += read_tile(row, width, tables, there, tile)
        require(len(found) - before == segment["nnz"], "nnz")
    found.sort()
    return [index for index, _ in found], [step for _, step in found]


WIDTHS: Final = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
GAPS: Final = {1: ("gap8",), 2: ("gap16.0", "gap16.1")}
ENCODINGS: Final = ("step", "max", "overwrite", "dense", "raw", "plain")
COLUMNS: Final = ("start", "length", "nnz", "gaps", "exceptions", "wide")
ROW: Final = {
    "name": str,
    "dtype": str,
    "shape": list,
    "encoding": str,
    "bucket": int,
    "gap": int,
    "nnz": int,
    "segments": int,
    "digest": str,
}
STREAM: Final = {"name": str, "stored": list, "raw": list, "digests": list}

Segment = dict[str, int]


# Section 3


@dataclass(frozen=True)
class Delta:
    """One tensor of a part: ``values[n]`` belongs to flat index ``indices[n]``."""

    row: dict[str, Any]
    indices: Sequence[int]
    values: list[int]

    @property
    def is_absolute(self) -> bool:
        return self.row["encoding"] not in ("step", "max")

    @property
    def width(self) -> int:
        return WIDTHS[self.row["dtype"]]

    def bytes(self) -> bytes:
        return b"".join(value.to_bytes(self.width, "little") for value in self.values)

    def apply(self, bits: list[int]) -> None:
        top = 1 << 8 * self.width
        for i, value in zip(self.indices, self.values, strict=True):
            bits[i] = value if self.is_absolute else (bits[i] + value) % top


def read_part(data: bytes, old: Mapping[str, Sequence[int]] | None = None) -> dict[str, Delta]:
    """Every tensor of a part, all of it verified; ``max`` needs the bits before it, by tensor."""
    metadata, entries, at = read_header(data)
    zstd = metadata["compression"] == "zstd"
    directory = read_directory(data[at : at + entries[0][3]], metadata, zstd=zstd)
    front = at + entries[0][3]
    require(data[front : front + 32] == blake3(data[:front]).digest(), "digest of the front")
    streams: dict[str, bytes] = {}
    at = front + 32
    require([e[0] for e in entries[2:]] == [s["name"] for s in directory["streams"]], "streams")
    for (name, _, _, nbytes), stream in zip(entries[2:], directory["streams"], strict=True):
        streams[name] = read_frames(data[at : at + nbytes], stream, zstd=zstd)
        at += nbytes
    forms = {name: (dtype, shape) for name, dtype, shape, _ in entries[2:]}
    return read_tensors(directory, streams, forms, old or {}, zstd=zstd)


def read_header(data: bytes) -> tuple[dict[str, str], list[tuple[str, str, list[int], int]], int]:
    """Metadata, ``(name, dtype, shape, nbytes)`` of each entry, and where the data begins."""
    require(len(data) >= 8, "too short")
    length = int.from_bytes(data[:8], "little")
    require(length <= min(100_000_000, len(data) - 8), "length of the header")
    document = read_json(data[8 : 8 + length])
    text = write_json(document)
    require(text + b" " * (-len(text) % 8) == data[8 : 8 + length], "header is not canonical")
    require(isinstance(document, dict) and next(iter(document), "") == "__metadata__", "metadata")
    metadata = document.pop("__metadata__")
    require(isinstance(metadata, dict) and list(metadata) == sorted(metadata), "metadata")
    require(all(isinstance(value, str) for value in metadata.values()), "metadata")
    require("deltachain" in metadata, "not a part")
    if metadata["deltachain"] != "1" or metadata.get("compression") not in ("zstd", "none"):
        raise UnsupportedError("a later part")
    entries, at = [], 0
    for name, entry in document.items():
        check_fields(entry, {"dtype": str, "shape": list, "data_offsets": list})
        check_shape(entry["dtype"], entry["shape"])
        nbytes = WIDTHS[entry["dtype"]] * numel_of(entry["shape"])
        require(entry["data_offsets"] == [at, at + nbytes], "entries do not tile the data")
        entries.append((name, entry["dtype"], entry["shape"], nbytes))
        at += nbytes
    require(8 + length + at == len(data), "length of the file")
    require([e[0] for e in entries[:2]] == ["directory", "digest"], "front")
    forms = [(dtype, len(shape)) for _, dtype, shape, _ in entries[:2]]
    require(forms == [("U8", 1)] * 2 and entries[1][3] == 32, "front")
    return metadata, entries, 8 + length


def check_shape(dtype: str, shape: Any) -> None:
    check_sizes(shape, "shape")
    require(dtype in WIDTHS and len(shape) <= 64, f"{dtype} {len(shape)} dimensions")


def numel_of(shape: Sequence[int]) -> int:
    product = 1
    for dim in shape:
        product *= dim
    return product


def inflate(frame: bytes, nbytes: int) -> bytes:
    try:
        require(zstandard.frame_content_size(frame) == nbytes, "content size of a frame")
        data = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as exc:
        raise RefusedError(str(exc)) from exc
    require(len(data) == nbytes, "content of a frame")
    return data


def read_directory(stored: bytes, metadata: dict[str, str], *, zstd: bool) -> dict[str, Any]:
    claimed = metadata.get("directory_nbytes", "")
    require(claimed.isdecimal() and len(claimed) < 10, "directory_nbytes")
    nbytes = int(claimed)
    require(str(nbytes) == claimed and nbytes <= 1 << 26, "directory_nbytes")
    require(zstd or nbytes == len(stored), "directory_nbytes")
    text = inflate(stored, nbytes) if zstd else stored
    directory = read_json(text)
    again = write_json(directory)
    require(text == again + (b"" if zstd else b" " * (-len(again) % 8)), "directory not canonical")
    check_fields(directory, {"tensors": list, "segments": dict, "streams": list})
    check_fields(directory["segments"], dict.fromkeys(COLUMNS, list))
    for column in directory["segments"].values():
        check_sizes(column, "segments")
    for row in directory["tensors"]:
        check_fields(row, ROW)
    for stream in directory["streams"]:
        check_fields(stream, STREAM)
        check_sizes(stream["stored"] + stream["raw"], "frames")
    return dict(directory)


def read_frames(data: bytes, stream: dict[str, Any], *, zstd: bool) -> bytes:
    rows = list(zip(stream["stored"], stream["raw"], stream["digests"], strict=False))
    lengths = {len(stream[column]) for column in ("stored", "raw", "digests")}
    require(lengths == {len(rows)} and sum(stream["stored"]) == len(data), "frames")
    pieces, at = [], 0
    for stored, raw, expected in rows:
        frame = data[at : at + stored]
        require(stored and 0 < raw <= 1 << 20 and (zstd or stored == raw), "frame")
        require(digest_of(frame) == expected, "digest of a frame")
        pieces.append(inflate(frame, raw) if zstd else frame)
        at += stored
    return b"".join(pieces)


# Section 4


class Cursor:
    """Takes each stream from front to back, and knows what is left."""

    def __init__(self, streams: dict[str, bytes]) -> None:
        self.streams = streams
        self.at = dict.fromkeys(streams, 0)
        self.bits: set[str] = set()

    def take(self, name: str, count: int) -> bytes:
        if not count:
            return b""
        at = self.at.get(name, 0)
        require(at + count <= len(self.streams.get(name, b"")), f"{name} is too short")
        self.at[name] = at + count
        return self.streams[name][at : at + count]

    def take_bits(self, name: str, count: int) -> list[int]:
        if not count:
            return []
        self.bits.add(name)
        at = self.at.get(name, 0)
        stream = self.streams.get(name, b"")
        require(at + count <= 8 * len(stream), f"{name} is too short")
        self.at[name] = at + count
        return [stream[n // 8] >> n % 8 & 1 for n in range(at, at + count)]

    def planes(self, names: Sequence[str], count: int) -> list[int]:
        planes = [self.take(name, count) for name in names]
        return [int.from_bytes(element, "little") for element in zip(*planes, strict=True)]

    def finish(self) -> None:
        for name, stream in self.streams.items():
            end = self.at[name]
            require(stream or "#" not in name[:1], f"{name} is empty")
            if name in self.bits:
                require((end + 7) // 8 == len(stream), f"{name} is too long")
                require(end % 8 == 0 or not stream[-1] >> end % 8, f"{name}: bits behind the end")
            else:
                require(end == len(stream), f"{name} is too long")


def read_tensors(
    directory: dict[str, Any],
    streams: dict[str, bytes],
    forms: dict[str, tuple[str, list[int]]],
    old: Mapping[str, Sequence[int]],
    *,
    zstd: bool,
) -> dict[str, Delta]:
    columns = directory["segments"]
    require(len({len(column) for column in columns.values()}) == 1, "segments")
    segments = [dict(zip(COLUMNS, s, strict=True)) for s in zip(*columns.values(), strict=True)]
    cursor = Cursor(streams)
    found: dict[str, Delta] = {}
    owned: set[str] = set()
    before, characters = "", 0
    for stored in directory["tensors"]:
        if stored["encoding"] not in ENCODINGS:
            raise UnsupportedError(stored["encoding"])
        check_shape(stored["dtype"], stored["shape"])
        is_short = stored["encoding"] == "max"
        row = lengthen(stored, before, segments[: stored["segments"]]) if is_short else stored
        before, characters = row["name"], characters + len(row["name"])
        require(characters <= 1 << 26, "names")
        require(row["name"] not in found and numel_of(row["shape"]) <= 1 << 48, "row")
        left = row["encoding"] == "max" and row["gap"] and not row["digest"]
        require(left or len(row["digest"]) == 32, "digest")
        require(set(row["digest"]) <= set("0123456789abcdef"), "digest")
        mine, segments = segments[: row["segments"]], segments[row["segments"] :]
        require(len(mine) == row["segments"], "segments")
        if row["encoding"] in ("raw", "plain"):
            require(not zstd and not (mine or row["gap"] or row["bucket"]), "raw row")
            found[row["name"]] = read_arrays(row, cursor, forms, owned)
        else:
            found[row["name"]] = read_segments(row, mine, cursor, old.get(row["name"], ()))
    require(not segments, "segments that are nobody's")
    shared = [
        row["digest"] for row in directory["tensors"] if row["encoding"] == "max" and row["gap"]
    ]
    require(not shared or shared[-1] != "", "digest")
    for name in streams.keys() - owned:
        dtype, shape = forms[name]
        require(name[:1] == "#" and (dtype, len(shape)) == ("U8", 1), f"{name}: form")
    cursor.finish()
    return found


def lengthen(row: dict[str, Any], before: str, segments: Sequence[Segment]) -> dict[str, Any]:
    """A row of ``max`` with its name and its count; its segments get their sizes."""
    require(row["nnz"] == 0, "nnz")
    digits, colon, rest = row["name"].partition(":")
    require(colon == ":" and digits.isdecimal() and len(digits) < 10, "name")
    same = int(digits)
    require(str(same) == digits and same <= len(before), "name")
    require(not rest or same == len(before) or rest[0] != before[same], "name")
    for s in segments:
        away = s["gaps"]
        usual = s["nnz"] * 9 // 8
        s["gaps"] = usual - (away + 1) // 2 if away % 2 else usual + away // 2
        require(s["gaps"] >= 0, "segment")
    return row | {"name": before[:same] + rest, "nnz": sum(s["nnz"] for s in segments)}


def read_arrays(
    row: dict[str, Any],
    cursor: Cursor,
    forms: dict[str, tuple[str, list[int]]],
    owned: set[str],
) -> Delta:
    """``raw`` and ``plain``."""
    numel, nnz, width = numel_of(row["shape"]), row["nnz"], WIDTHS[row["dtype"]]

    def array(name: str, dtype: str, shape: list[int]) -> list[int]:
        require(forms.get(name) == (dtype, shape) and name not in owned, f"{name}: form")
        owned.add(name)
        size = WIDTHS[dtype]
        data = cursor.take(name, size * numel_of(shape))
        return [int.from_bytes(data[n : n + size], "little") for n in range(0, len(data), size)]

    if row["encoding"] == "plain":
        require(nnz == numel, "nnz")
        return Delta(row, range(numel), array(row["name"], row["dtype"], row["shape"]))
    indices = array(f"{row['name']}.indices", "I32" if numel < 1 << 31 else "I64", [nnz])
    values = array(f"{row['name']}.values", row["dtype"], [nnz])
    ascending = all(a < b for a, b in pairwise(indices))
    require(ascending and all(i < numel for i in indices), "indices")
    require(all(value < 1 << 8 * width for value in values), "values")
    return Delta(row, indices, values)


def read_segments(
    row: dict[str, Any], segments: list[Segment], cursor: Cursor, old: Sequence[int]
) -> Delta:
    """``step``, ``max``, ``overwrite`` and ``dense``."""
    encoding, reached = row["encoding"], 0
    most = {"dense": range(1), "max": range(65)}.get(encoding, range(1, 3))
    require(row["gap"] in most, "gap")
    columns = (row["shape"] or [1])[-1] if encoding == "max" and row["gap"] > 1 else 1
    require(columns > 0 and (columns == 1 or columns % row["gap"] == 0), "gap")
    require(row["nnz"] == sum(s["nnz"] for s in segments), "nnz")
    indices: list[int] = []
    for s in segments:
        require(0 < s["nnz"] <= s["length"] <= 1 << 20 and s["start"] >= reached, "segment")
        reached = s["start"] + s["length"]
        require(reached <= numel_of(row["shape"]), "segment")
        require(encoding == "step" or s["exceptions"] == s["wide"] == 0, "segment")
        if encoding == "dense":
            require(s["nnz"] == s["length"] and not s["gaps"], "segment")
            indices += range(s["start"], reached)
        elif encoding == "max":
            require(s["start"] % columns == s["length"] % columns == 0, "segment")
            bound = s["length"] // 8 + 16 * s["nnz"] + 16 * max(row["gap"], 1)
            require(s["gaps"] <= bound, "segment")
        else:
            offsets = read_gaps(row, s, cursor)
            indices += [s["start"] + offset for offset in offsets]
    if encoding == "max":
        prefix, width = f"#{row['bucket']}.", WIDTHS[row["dtype"]]
        tables = cursor.take(prefix + "class", 512) if segments else bytes([255]) * 512
        tiles = [cursor.take(prefix + "tile", s["gaps"]) for s in segments]
        require(row["gap"] > 0 or numel_of(row["shape"]) <= 1 << 20, "gap")
        known = not segments or row["gap"] == 0 or len(old) == numel_of(row["shape"])
        require(known, "no bits before max")
        indices, values = read_tiles(row, width, segments, (tables, tiles), old)
    elif encoding == "step":
        values = [step for s in segments for step in read_steps(row, s, cursor)]
    else:
        stream = {"overwrite": "value", "dense": "dense"}[encoding]
        names = [f"#{row['bucket']}.{stream}.{k}" for k in range(WIDTHS[row["dtype"]])]
        values = [value for s in segments for value in cursor.planes(names, s["nnz"])]
    return Delta(row, indices, values)


def read_gaps(row: dict[str, Any], segment: Segment, cursor: Cursor) -> list[int]:
    names = [f"#{row['bucket']}.{name}" for name in GAPS[row["gap"]]]
    most = (1 << 8 * row["gap"]) - 1
    offsets, at = [], 0
    gaps = cursor.planes(names, segment["gaps"])
    for gap in gaps:
        at += gap
        if gap < most:
            offsets.append(at)
            at += 1
    fits = len(offsets) == segment["nnz"] and offsets[-1] < segment["length"] and gaps[-1] < most
    require(fits, "gaps leave the segment")
    return offsets


def read_steps(row: dict[str, Any], segment: Segment, cursor: Cursor) -> Iterator[int]:
    prefix, width = f"#{row['bucket']}.", WIDTHS[row["dtype"]]
    top = 1 << 8 * width
    signs = cursor.take_bits(prefix + "sign", segment["nnz"])
    exceptions = cursor.take_bits(prefix + "exception", segment["nnz"])
    magnitudes = cursor.take(prefix + "magnitude", segment["exceptions"])
    wide = cursor.planes([f"{prefix}wide.{k}" for k in range(width)], segment["wide"])
    require(sum(exceptions) == len(magnitudes) and magnitudes.count(255) == len(wide), "exceptions")
    short, long = iter(magnitudes), iter(wide)
    for sign, exception in zip(signs, exceptions, strict=True):
        magnitude = next(short) if exception else 1
        require(not exception or magnitude > 1, "steps are not canonical")
        step = magnitude if not sign else top - magnitude
        if magnitude == 255:
            step = next(long)
            require((top - step if sign else step) >= 255, "steps are not canonical")
        require(0 < step < top and step >> 8 * width - 1 == sign, "steps are not canonical")
        yield step
