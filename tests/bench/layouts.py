"""All layouts of other systems, by name, in the order of tables."""

import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from deltachain.bridges.files import Array, packed
from deltachain.bridges.frames import Bytes, deflated, xor_frames
from deltachain.bridges.slime import MODELEXPRESS, SLIME, IndexedDialect
from deltachain.bridges.trl import TRLDialect, gaps_of, indices_of
from deltachain.types import BITS_DTYPES, Bits, TensorSpec
from tests.bench.chains import ChangedTensors, TensorChange


def load(file: bytes) -> dict[str, memoryview]:
    start = 8 + int.from_bytes(file[:8], "little")
    header: dict[str, Any] = json.loads(file[8:start])
    header.pop("__metadata__", None)
    data = memoryview(file)[start:]
    return {name: data[slice(*row["data_offsets"])] for name, row in header.items()}


Objects: TypeAlias = tuple[bytes, ...]
"""Contents of the objects that store one update."""

Specs: TypeAlias = Mapping[str, TensorSpec]

FILLER: Final = 0xA5
"""Byte of unchanged elements in `PeerLayout.check`, so that a write to one of them is seen."""


@dataclass(frozen=True, slots=True)
class DecodedWrite:
    """What a receiver writes into one tensor."""

    positions: npt.NDArray[np.integer[Any]] | None
    values: Bits
    xor: bool

    def apply(self, weights: Bits) -> None:
        target = weights.view(self.values.dtype)
        where = slice(None) if self.positions is None else self.positions
        if self.xor:
            target[where] ^= self.values
        else:
            target[where] = self.values


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLayout:
    """A layout of another system."""

    name: str
    encode: Callable[[ChangedTensors], Objects]
    decode: Callable[[Objects, Specs], Iterator[tuple[str, DecodedWrite]]]
    any_dtype: bool = False

    def nbytes(self, changes: ChangedTensors) -> int:
        return sum(map(len, self.encode(changes)))

    def check(self, changes: ChangedTensors, objects: Objects) -> None:
        writes = dict(self.decode(objects, specs_of(changes)))
        for name, change in changes.items():
            weights, expected = _before_and_after(change)
            if name in writes:
                writes[name].apply(weights)
            if not np.array_equal(weights, expected):
                raise ArithmeticError(f"{self.name}: {name} does not decode to what was encoded")
        if not writes.keys() <= changes.keys():
            raise ArithmeticError(f"{self.name}: decoded tensors that were not encoded")


def specs_of(changes: ChangedTensors) -> dict[str, TensorSpec]:
    return {name: change.spec for name, change in changes.items()}


def changed(changes: ChangedTensors) -> dict[str, TensorChange]:
    return {name: change for name, change in changes.items() if change.nnz}


def _before_and_after(change: TensorChange) -> tuple[Bits, Bits]:
    size, dtype = change.numel * change.spec.itemsize, BITS_DTYPES[change.spec.itemsize]
    weights = np.full(size, FILLER, np.uint8).view(dtype)
    weights[change.indices] = change.old
    expected = weights.copy()
    expected[change.indices] = change.new
    return weights, expected


BUCKET_NBYTES: Final = 512 << 20

_GAP_WIDTHS: Final = ((0xFFFF, "<u2"), (0xFFFFFFFF, "<u4"), (1 << 63, "<u8"))


def encode_nemo(changes: ChangedTensors) -> Objects:
    """NeMo-RL's default, ``xor``: one zstd-1 frame around ``torch.save`` of a payload.

    A payload is the gaps of all its tensors as bytes (uint16, or wider where one does not fit; none
    where the changes are one contiguous range), old XOR new of all changes, and a dictionary a
    tensor. Its checksum travels beside it and is not counted. Source: NeMo-RL 7ea279abf
    (``weight_transfer_sparse_codec.py``, ``weight_transfer_stream.py``), bf16 and fp16 only.
    """
    compressor = zstandard.ZstdCompressor(level=1)
    return tuple(compressor.compress(_payload(bucket)) for bucket in _buckets(changed(changes)))


def decode_nemo(objects: Objects, specs: Specs) -> Iterator[tuple[str, DecodedWrite]]:
    for data in objects:
        raw = zstandard.ZstdDecompressor().decompress(data)
        places, (values,), rows = torch.load(io.BytesIO(raw), weights_only=True)
        places, values = places.numpy(), values.numpy().view(np.uint16)
        for row in rows:
            own = values[row["value_start"] : row["value_end"]]
            gaps = places[row["index_start"] : row["index_end"]]
            spec = specs[row["name"]]
            yield spec.name, DecodedWrite(_positions(row, gaps, own.size), own, xor=True)


def _buckets(changes: ChangedTensors) -> Iterator[list[TensorChange]]:
    bucket: list[TensorChange] = []
    size = 0
    for change in changes.values():
        if bucket and size + change.spec.nbytes > BUCKET_NBYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(change)
        size += change.spec.nbytes
    if bucket:
        yield bucket


def _payload(bucket: list[TensorChange]) -> bytes:
    places: list[npt.NDArray[np.uint8]] = []
    rows: list[dict[str, Any]] = []
    index_end = value_end = 0
    for change in bucket:
        first, last = int(change.indices[0]), int(change.indices[-1])
        contiguous = last - first + 1 == change.nnz
        location: dict[str, Any] = {"index_encoding": "deltas"}
        index_start, value_start = index_end, value_end
        if contiguous:
            location = {"index_encoding": "range", "range_start": first}
        else:
            places.append(_gap_bytes(change.indices))
            index_end += places[-1].size
        value_end += change.nnz
        row = {
            "name": change.spec.name,
            "shape": change.spec.shape,
            "dtype": "bfloat16",
            "operation": "xor",
            "index_start": index_start,
            "index_end": index_end,
            "value_group": 0,
            "value_start": value_start,
            "value_end": value_end,
        }
        rows.append(row | location)
    values = np.concatenate([change.old ^ change.new for change in bucket])
    joined = np.concatenate(places) if places else np.empty(0, np.uint8)
    out = io.BytesIO()
    groups = (torch.from_numpy(values.view(np.int16)),)
    torch.save((torch.from_numpy(joined), groups, rows), out)
    return out.getvalue()


def _gap_bytes(indices: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    gaps = gaps_of(indices)
    dtype = next(dtype for limit, dtype in _GAP_WIDTHS if gaps.max() <= limit)
    return gaps.astype(dtype).view(np.uint8)


def _positions(
    row: Mapping[str, Any], gaps: npt.NDArray[np.uint8], total: int
) -> npt.NDArray[np.int64]:
    if row["index_encoding"] == "range":
        return np.arange(row["range_start"], row["range_start"] + total)
    return indices_of(gaps.view(f"<u{gaps.size // total}"))


NEMO_XOR: Final = PeerLayout(name="NeMo-RL xor, zstd-1", encode=encode_nemo, decode=decode_nemo)


_DTYPES: Final[dict[str, str]] = {"uint8": "|u1", "uint16": "<u2", "int32": "<i4"}


def encode_pulse(changes: ChangedTensors) -> Objects:
    """PULSE (arXiv 2602.03839) as its code, grail, writes it by default: ``sparse_codec_v3.1``.

    A uint32 length, a JSON header with a row a tensor, and for each tensor, by name: the row of
    each change less that of the change before (uint8, or wider), its column, less that of the
    change before in the same row (uint16, or int32), and its new bits; all in one frame. Dimensions
    behind the first are one. The metadata file beside it is not counted.
    Source: grail 54d6342 (``sparse_codec.py``, ``delta_checkpoint.py``).
    """
    rows: list[dict[str, Any]] = []
    data: list[bytes] = []
    offset = 0
    for name, change in sorted(changed(changes).items()):
        row_name, row_steps = _narrow(_row_steps(change), ("uint8", "uint16", "int32"))
        col_name, col_steps = _narrow(_column_steps(change), ("uint16", "int32"))
        parts = [row_steps, col_steps, change.new.tobytes()]
        places = len(row_steps) + len(col_steps)
        rows.append(
            {
                "name": name,
                "shape": list(change.spec.shape),
                "num_nonzero": change.nnz,
                "value_dtype": "bfloat16",
                "row_dtype": row_name,
                "col_dtype": col_name,
                "indices_offset": offset,
                "indices_size": places,
                "rows_size": len(row_steps),
                "cols_size": len(col_steps),
                "values_offset": offset + places,
                "values_size": len(parts[2]),
            }
        )
        data += parts
        offset += sum(map(len, parts))
    header = json.dumps({"version": 31, "tensors": rows}, separators=(",", ":")).encode()
    content = b"".join([len(header).to_bytes(4, "little"), header, *data])
    return (zstandard.ZstdCompressor(level=1).compress(content),)


def decode_pulse(objects: Objects, specs: Specs) -> Iterator[tuple[str, DecodedWrite]]:
    content = zstandard.ZstdDecompressor().decompress(objects[0])
    start = 4 + int.from_bytes(content[:4], "little")
    for row in json.loads(content[4:start])["tensors"]:
        total = row["num_nonzero"]
        rows_at = start + row["indices_offset"]
        row_steps = np.frombuffer(content, _DTYPES[row["row_dtype"]], total, rows_at)
        cols_at = rows_at + row["rows_size"]
        col_steps = np.frombuffer(content, _DTYPES[row["col_dtype"]], total, cols_at)
        values = np.frombuffer(content, "<u2", total, start + row["values_offset"])
        indices = _indices(row_steps, col_steps, _columns(specs[row["name"]]))
        yield row["name"], DecodedWrite(indices, values, xor=False)


def _columns(spec: TensorSpec) -> int:
    return math.prod(spec.shape[1:])


def _row_steps(change: TensorChange) -> npt.NDArray[np.int64]:
    return np.diff(change.indices // _columns(change.spec), prepend=0)


def _column_steps(change: TensorChange) -> npt.NDArray[np.int64]:
    columns = change.indices % _columns(change.spec)
    same_row = _row_steps(change) == 0
    same_row[0] = False
    return columns - np.where(same_row, np.roll(columns, 1), 0)


def _indices(
    row_steps: npt.NDArray[Any], col_steps: npt.NDArray[Any], columns: int
) -> npt.NDArray[np.int64]:
    first = row_steps != 0
    first[0] = True
    passed = np.cumsum(col_steps, dtype=np.int64)
    before = (passed - col_steps)[first]
    in_row = passed - np.repeat(before, np.diff(np.flatnonzero(first), append=first.size))
    found: npt.NDArray[np.int64] = np.cumsum(row_steps, dtype=np.int64) * columns + in_row
    return found


def _narrow(steps: npt.NDArray[np.int64], names: tuple[str, ...]) -> tuple[str, bytes]:
    fits = (name for name in names if steps.max() <= np.iinfo(_DTYPES[name]).max)
    name = next(fits)
    return name, steps.astype(_DTYPES[name]).tobytes()


PULSE: Final = PeerLayout(name="PULSE v3.1, zstd-1", encode=encode_pulse, decode=decode_pulse)


ESCAPE: Final = 0xFFFF


def encode_streams(changes: ChangedTensors) -> Objects:
    """Former ``deltas`` encoding of slime: uint16 gaps and bf16 values, 32 bits a change.

    The two streams over the concatenation of all tensors, no header. A gap that does not fit takes
    one more gap for each 65535 skipped: the source says nothing, this is the cheapest.
    Source: slime ``docker/patch/v0.5.12.post1/sglang.patch`` (DeltaSpec).
    """
    starts = np.cumsum([0, *(change.numel for change in changes.values())])
    indices = np.concatenate(
        [change.indices + start for change, start in zip(changes.values(), starts, strict=False)]
    )
    gaps = gaps_of(indices)
    escapes = gaps // ESCAPE
    stream = np.full(gaps.size + int(escapes.sum()), ESCAPE, "<u2")
    stream[np.cumsum(escapes) + np.arange(gaps.size)] = gaps % ESCAPE
    values = np.concatenate([change.new for change in changes.values()])
    return stream.tobytes(), values.tobytes()


def decode_streams(objects: Objects, specs: Specs) -> Iterator[tuple[str, DecodedWrite]]:
    stream, values = (np.frombuffer(data, "<u2") for data in objects)
    ends = np.flatnonzero(stream != ESCAPE)
    passed = np.cumsum(stream, dtype=np.int64)[ends]
    indices = indices_of(np.diff(passed, prepend=0))
    start = first = 0
    for name, spec in specs.items():
        last = int(np.searchsorted(indices, start + spec.numel))
        yield name, DecodedWrite(indices[first:last] - start, values[first:last], xor=False)
        start, first = start + spec.numel, last


def encode_compressed_streams(changes: ChangedTensors) -> Objects:
    """Former ``deltas_zstd`` of slime: the two streams of `encode_streams`, a zstd-1 frame each."""
    compressor = zstandard.ZstdCompressor(level=1)
    return tuple(compressor.compress(stream) for stream in encode_streams(changes))


def decode_compressed_streams(objects: Objects, specs: Specs) -> Iterator[tuple[str, DecodedWrite]]:
    inflate = zstandard.ZstdDecompressor().decompress
    return decode_streams(tuple(map(inflate, objects)), specs)


SLIME_DELTAS: Final = PeerLayout(
    name="slime deltas: u16 gap + bf16", encode=encode_streams, decode=decode_streams
)
SLIME_DELTAS_ZSTD: Final = PeerLayout(
    name="slime deltas, zstd-1",
    encode=encode_compressed_streams,
    decode=decode_compressed_streams,
)


def encode_indices(changes: ChangedTensors) -> Objects:
    """TRL's first draft, 48 bits a change and a safetensors header."""
    return (TRLDialect(absolute=True).file(2, list(changes.values())),)


def decode_indices(objects: Objects, specs: Specs) -> Iterator[tuple[str, DecodedWrite]]:
    arrays = load(objects[0])
    for name in specs:
        indices = np.frombuffer(arrays[f"{name}.indices"], "<i4")
        values = np.frombuffer(arrays[f"{name}.values"], "<u2")
        yield name, DecodedWrite(indices, values, xor=False)


def encode_gaps(changes: ChangedTensors) -> Objects:
    """TRL's later drafts, 32 bits a change and a safetensors header."""
    return (TRLDialect().file(2, list(changes.values())),)


def decode_gaps(objects: Objects, specs: Specs) -> Iterator[tuple[str, DecodedWrite]]:
    arrays = load(objects[0])
    for name in specs:
        values = np.frombuffer(arrays[f"{name}.val"], "<u2")
        wide = len(arrays[f"{name}.idx"]) > values.nbytes
        gaps: npt.NDArray[Any] = np.frombuffer(arrays[f"{name}.idx"], "<u4" if wide else "<u2")
        yield name, DecodedWrite(indices_of(gaps), values, xor=False)


TRL_V1: Final = PeerLayout(
    name="TRL v1: int32 + bf16", encode=encode_indices, decode=decode_indices
)
TRL_GAPS: Final = PeerLayout(
    name="TRL v2/v3: u16 gap + bf16", encode=encode_gaps, decode=decode_gaps
)


FILE: Final = "model-00001-of-00001.safetensors"


def encode_slime_xor(changes: ChangedTensors) -> Objects:
    """Default of slime, with zeros as digests."""
    return _indexed(SLIME, _xor_frames(changes), "0" * 32)


def encode_slime_overwrite(changes: ChangedTensors) -> Objects:
    """Overwrite mode of slime: the changed *bytes* of a tensor.

    A frame holds a uint32 count, that many uint32 byte positions, and the new bytes. Files
    as in `encode_slime_xor`.
    """
    frames = {one.spec.name: deflated(_changed_bytes(one)) for one in changed(changes).values()}
    return _indexed(SLIME, frames, "0" * 32)


def encode_skyrl(changes: ChangedTensors) -> Objects:
    """SkyRL: the frames of `encode_slime_xor` in a plain safetensors file.

    Without the manifest, whose layout is not described; on an 18 M element model it is about 9 kB
    of 0.53 MB. Source: SkyRL a9564572e (``delta_checkpoint.py``; its compression level is 1 as
    called).
    """
    return (packed(_arrays(_xor_frames(changes)), {}),)


def encode_modelexpress(changes: ChangedTensors) -> Objects:
    """ModelExpress, with zeros as digests."""
    return _indexed(MODELEXPRESS, _xor_frames(changes), "0" * 8)


def decode_xor(objects: Objects, specs: Specs) -> Iterator[tuple[str, DecodedWrite]]:
    frames = load(objects[0])
    for name in specs:
        if name in frames:
            difference = np.frombuffer(_inflate(frames[name]), np.uint8)
            yield name, DecodedWrite(None, difference, xor=True)


def decode_overwrite(objects: Objects, specs: Specs) -> Iterator[tuple[str, DecodedWrite]]:
    frames = load(objects[0])
    for name in specs:
        if name not in frames:
            continue
        frame = _inflate(frames[name])
        total = int(np.frombuffer(frame, "<u4", 1)[0])
        positions = np.frombuffer(frame, "<u4", total, 4)
        yield name, DecodedWrite(positions, np.frombuffer(frame[4 + 4 * total :], np.uint8), False)


def _xor_frames(changes: ChangedTensors) -> dict[str, Bytes]:
    return {change.spec.name: frame for change, frame in xor_frames(changes.values())}


def _arrays(frames: Mapping[str, Bytes]) -> Iterator[Array]:
    return (Array(name, "U8", frame) for name, frame in frames.items())


def _indexed(dialect: IndexedDialect, frames: Mapping[str, Bytes], digest: str) -> Objects:
    file = packed(_arrays(frames), dict.fromkeys(frames, digest))
    return file, dialect.index(2, dict.fromkeys(frames, FILE))


def _inflate(frame: memoryview) -> bytes:
    return zstandard.ZstdDecompressor().decompress(frame)


def _changed_bytes(change: TensorChange) -> npt.NDArray[np.uint8]:
    width = change.spec.itemsize
    difference = (change.old ^ change.new).view(np.uint8).reshape(-1, width)
    element, byte = np.nonzero(difference)
    positions = (change.indices[element] * width + byte).astype("<u4")
    values = change.new.view(np.uint8).reshape(-1, width)[element, byte]
    total = np.array([positions.size], "<u4")
    return np.concatenate([total.view(np.uint8), positions.view(np.uint8), values])


SLIME_XOR: Final = PeerLayout(
    name="slime xor, zstd-1", encode=encode_slime_xor, decode=decode_xor, any_dtype=True
)
SLIME_OVERWRITE: Final = PeerLayout(
    name="slime overwrite, zstd-1",
    encode=encode_slime_overwrite,
    decode=decode_overwrite,
    any_dtype=True,
)
SKYRL_XOR: Final = PeerLayout(
    name="SkyRL xor, zstd-1", encode=encode_skyrl, decode=decode_xor, any_dtype=True
)
MODELEXPRESS_XOR: Final = PeerLayout(
    name="ModelExpress xor, zstd-1", encode=encode_modelexpress, decode=decode_xor, any_dtype=True
)


LAYOUTS: Final[dict[str, PeerLayout]] = {
    layout.name: layout
    for layout in (
        TRL_V1,
        TRL_GAPS,
        SLIME_XOR,
        SLIME_OVERWRITE,
        SKYRL_XOR,
        SLIME_DELTAS,
        SLIME_DELTAS_ZSTD,
        NEMO_XOR,
        PULSE,
        MODELEXPRESS_XOR,
    )
}
