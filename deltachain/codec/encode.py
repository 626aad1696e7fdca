"""Encoding of deltas as the bytes of one part (FORMAT.md 3 and 4)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from deltachain.codec import directory as d
from deltachain.codec.bucket_writer import BucketWriter
from deltachain.codec.container import write_header
from deltachain.codec.encodings import EncodedTensor, Encoding
from deltachain.codec.encodings.dense import DenseEncoding
from deltachain.codec.encodings.overwrite import OverwriteEncoding
from deltachain.codec.encodings.plain import PlainEncoding
from deltachain.codec.encodings.raw import RawEncoding
from deltachain.codec.encodings.step import StepEncoding
from deltachain.codec.frames import cut, deflate
from deltachain.delta import TensorDelta
from deltachain.errors import ConfigError
from deltachain.format.digest import object_digest
from deltachain.threads import Pool
from deltachain.types import WIRE_DTYPES, Buffer, StateDigest

_STEP, _OVERWRITE, _DENSE = StepEncoding(), OverwriteEncoding(), DenseEncoding()
_RAW, _PLAIN = RawEncoding(), PlainEncoding()

BUCKET: Final = 1 << 26
"""Elements of consecutive tensors in one bucket; a larger tensor has a bucket of its own."""

FORMAT: Final = "1"


@dataclass(frozen=True, slots=True)
class Change:
    """One tensor's change, as input of a part.

    Attributes:
        delta: The changed elements.
        digest: State digest of these elements; for a sparse delta, minus that of their old bits.
        windows: Whether a delta with indices sets whole windows of a tensor, whatever their old
            bits, and is not sparse.
        encoding: Encoding of the change; by default the encoding that fits the delta.
    """

    delta: TensorDelta
    digest: StateDigest
    windows: bool = False
    encoding: Encoding | None = None


@dataclass(frozen=True, slots=True)
class EncodedPart:
    """One immutable payload object.

    Attributes:
        data: Content of the safetensors file.
        digest: blake3 of ``data``.
        directory: blake3 of all bytes before the streams, as stored in the file.
        nnz: Number of stored elements.
        encodings: Sorted names of all encodings in the part.
    """

    data: bytes
    digest: str
    directory: str
    nnz: int
    encodings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Stream:
    row: d.StreamRow
    dtype: str
    shape: tuple[int, ...]
    frames: list[Buffer]


@dataclass(frozen=True, slots=True)
class _Encoded:
    rows: list[d.TensorRow]
    segments: list[d.Segment]
    streams: list[_Stream]


def encode_part(changes: Iterable[Change], *, raw: bool = False) -> EncodedPart:
    """Encode tensor deltas as one part.

    By default, steps are encoded as ``step``, absolute bits as ``overwrite`` and dense deltas as
    ``dense``.

    Args:
        changes: Changes in the order of the tensor table.
        raw: Whether to disable compression. Absolute bits are then encoded as ``raw`` and dense
            deltas as ``plain``, which any safetensors reader can open.

    Raises:
        ConfigError: A delta mixes steps and absolute bits, or its encoding cannot store it.
    """
    groups = list(_buckets(changes))
    encode = partial(_encode_bucket, raw=raw)
    if len(groups) > 1 and not raw:
        with Pool(min(len(groups), os.cpu_count() or 1)) as pool:
            encoded = list(pool.map(encode, range(len(groups)), groups))
    else:
        encoded = list(map(encode, range(len(groups)), groups))
    return _assemble(encoded, compress=not raw)


def _buckets(changes: Iterable[Change]) -> Iterator[list[Change]]:
    """Divide consecutive tensors of one element width into buckets."""
    group: list[Change] = []
    numel = 0
    for change in changes:
        spec = change.delta.spec
        width = group[0].delta.spec.itemsize if group else spec.itemsize
        if group and (numel + spec.numel > BUCKET or spec.itemsize != width):
            yield group
            group, numel = [], 0
        group.append(change)
        numel += spec.numel
    if group:
        yield group


def _encode_bucket(number: int, group: Sequence[Change], *, raw: bool) -> _Encoded:
    out, encoded = BucketWriter(), _Encoded([], [], [])
    for change in group:
        encoding = change.encoding or _fitting(change, raw=raw)
        if encoding.own_arrays and not raw:
            raise ConfigError(f"{change.delta.spec.name}: {encoding.name} is never compressed")
        tensor = encoding.encode(change.delta, out)
        bucket = 0 if encoding.own_arrays else number
        encoded.rows.append(_row(change, encoding, bucket, tensor))
        encoded.segments.extend(tensor.segments)
    for array in out.arrays:
        stream = _stream(array.name, array.dtype, array.shape, array.data, compress=False)
        encoded.streams.append(stream)
    for name in sorted(out.pieces):
        data = np.concatenate(out.pieces[name])
        if d.in_bits(name):
            data = np.packbits(data, bitorder="little")
        if data.size:
            full = d.stream_name(number, name)
            encoded.streams.append(_stream(full, "U8", data.shape, data, compress=not raw))
    return encoded


def _fitting(change: Change, *, raw: bool) -> Encoding:
    """Return the encoding of a change, by default the one that fits its delta."""
    delta = change.delta
    if delta.indices is None or change.windows:
        return _PLAIN if raw else _DENSE
    if raw:
        return _RAW
    return _OVERWRITE if delta.absolute.ndim or delta.absolute else _STEP


def _row(change: Change, encoding: Encoding, bucket: int, tensor: EncodedTensor) -> d.TensorRow:
    spec = change.delta.spec
    return d.TensorRow(
        name=spec.name,
        dtype=spec.dtype,
        shape=spec.shape,
        encoding=encoding.name,
        bucket=bucket,
        gap=tensor.gap,
        nnz=change.delta.nnz,
        segments=len(tensor.segments),
        digest=str(change.digest),
    )


def _stream(
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    data: npt.NDArray[Any],
    *,
    compress: bool,
) -> _Stream:
    frames, sizes = cut(np.ascontiguousarray(data).data, compress=compress)
    stored = tuple(len(frame) for frame in frames)
    digests = tuple(object_digest(frame) for frame in frames)
    row = d.StreamRow(name=name, stored=stored, raw=tuple(sizes), digests=digests)
    return _Stream(row, dtype, (sum(stored),) if compress else shape, frames)


def _assemble(encoded: Sequence[_Encoded], *, compress: bool) -> EncodedPart:
    """Join the directory, the digest of all bytes before the streams, and the streams."""
    rows = [row for item in encoded for row in item.rows]
    streams = [stream for item in encoded for stream in item.streams]
    if not compress:  # wide elements first, so that every array is aligned
        streams.sort(key=lambda s: -WIRE_DTYPES[s.dtype])
    document = _directory(rows, [s for item in encoded for s in item.segments], streams)
    stored = deflate(document) if compress else document + b" " * (-len(document) % 8)
    metadata = {
        "deltachain": FORMAT,
        "compression": "zstd" if compress else "none",
        "directory_nbytes": str(len(document) if compress else len(stored)),
    }
    entries: list[tuple[str, str, tuple[int, ...], int]] = [
        ("directory", "U8", (len(stored),), len(stored)),
        ("digest", "U8", (32,), 32),
    ]
    entries += [(s.row.name, s.dtype, s.shape, sum(s.row.stored)) for s in streams]
    front = write_header(metadata, entries) + stored
    digest = object_digest(front)
    data = b"".join([front, bytes.fromhex(digest), *(f for s in streams for f in s.frames)])
    encodings = tuple(sorted({row.encoding for row in rows}))
    return EncodedPart(data, object_digest(data), digest, sum(row.nnz for row in rows), encodings)


def _directory(
    rows: Sequence[d.TensorRow], segments: list[d.Segment], streams: Sequence[_Stream]
) -> bytes:
    """Serialise the directory; refuse duplicate names in the file."""
    names = [row.name for row in rows]
    entries = ["__metadata__", "directory", "digest", *(stream.row.name for stream in streams)]
    for group in (names, entries):
        if len(set(group)) < len(group):
            repeated = next(name for name in group if group.count(name) > 1)
            raise ConfigError(f"duplicate name {repeated!r} in one part")
    document = msgspec.json.encode(
        d.Directory(
            tensors=tuple(rows),
            segments=d.columns_of(segments),
            streams=tuple(stream.row for stream in streams),
        )
    )
    if len(document) > d.MAX_DIRECTORY:
        raise ConfigError(
            f"a directory of {len(document)} bytes, at most {d.MAX_DIRECTORY}",
            hint="write smaller parts",
        )
    return document
