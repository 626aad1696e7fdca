"""Deltas to the bytes of one part (FORMAT.md 3 and 4)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from deltachain.codec import directory as d
from deltachain.codec.container import write_header
from deltachain.codec.frames import cut, deflate
from deltachain.delta import TensorDelta
from deltachain.errors import ConfigError
from deltachain.format.digest import object_digest
from deltachain.kernels import host
from deltachain.threads import Pool
from deltachain.types import WIRE_DTYPES, Bits, Buffer, Indices, StateDigest

SEGMENT: Final = 1 << 20
"""Elements a segment spans: what a reader must decode to get at one element."""

BUCKET: Final = 1 << 26
"""Elements of consecutive tensors that share streams; a larger tensor is a bucket of its own."""

WIDE_GAPS_BELOW: Final = 0.003
"""Density below which 2-byte gaps in planes are smaller than 1-byte gaps (codec study 3d)."""

FORMAT: Final = "1"


@dataclass(frozen=True, slots=True)
class Change:
    """What goes into a part for one tensor.

    Attributes:
        delta: The elements that are given.
        digest: What they add to the state digest; for a sparse delta, less what they added before.
        windows: Whether a delta with indices is not sparse: it gives bits to windows of a tensor,
            whatever was there.
    """

    delta: TensorDelta
    digest: StateDigest
    windows: bool = False


@dataclass(frozen=True, slots=True)
class EncodedPart:
    """One immutable payload object.

    Attributes:
        data: The safetensors file.
        digest: blake3 of ``data``.
        directory: blake3 of everything in front of the streams, as stored in the file.
        nnz: Elements stored.
        encodings: Every encoding used, sorted.
    """

    data: bytes
    digest: str
    directory: str
    nnz: int
    encodings: tuple[str, ...]


@dataclass(slots=True)
class _Bucket:
    """Rows and streams under construction."""

    number: int
    rows: list[d.TensorRow] = field(default_factory=list)
    segments: list[d.Segment] = field(default_factory=list)
    pieces: dict[str, list[Any]] = field(default_factory=dict)

    def put(self, stream: str, piece: Any) -> None:  # noqa: ANN401 - any flat array
        self.pieces.setdefault(stream, []).append(piece)


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
    """Encode tensor deltas, in the order of the tensor table, as one part.

    Steps become ``step``, absolute bits ``overwrite`` and dense deltas ``dense``; with ``raw``,
    absolute bits become ``raw`` and dense deltas ``plain``, which any safetensors reader can open.

    Raises:
        ConfigError: A delta mixes steps and absolute bits, or steps were to be written ``raw``.
    """
    groups = list(_buckets(changes))
    if raw:
        encoded = [_encode_raw(group) for group in groups]
    elif len(groups) > 1:
        with Pool(min(len(groups), os.cpu_count() or 1)) as pool:
            encoded = list(pool.map(_encode_bucket, range(len(groups)), groups))
    else:
        encoded = [_encode_bucket(number, group) for number, group in enumerate(groups)]
    return _assemble(encoded, compress=not raw)


def _buckets(changes: Iterable[Change]) -> Iterator[list[Change]]:
    """Cut consecutive tensors of one element width into buckets."""
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


def _encode_bucket(number: int, group: Sequence[Change]) -> _Encoded:
    bucket = _Bucket(number)
    for change in group:
        _add_tensor(bucket, change)
    streams = []
    for stream in sorted(bucket.pieces):
        data = np.concatenate(bucket.pieces[stream])
        if d.in_bits(stream):
            data = np.packbits(data, bitorder="little")
        if data.size:
            streams.append(_stream(d.stream_name(number, stream), "U8", (), data, compress=True))
    return _Encoded(bucket.rows, bucket.segments, streams)


def _add_tensor(bucket: _Bucket, change: Change) -> None:
    delta = change.delta
    if delta.indices is None or change.windows:
        segments, encoding, gap = _add_dense(bucket, delta), d.DENSE, 0
    elif delta.absolute.ndim:
        raise ConfigError(f"{delta.spec.name}: steps and absolute bits do not mix in one part")
    else:
        gap = 2 if delta.nnz < WIDE_GAPS_BELOW * delta.spec.numel else 1
        encoding = d.OVERWRITE if delta.absolute else d.STEP
        segments = _add_sparse(bucket, delta, delta.indices, gap)
    bucket.rows.append(_row(change, encoding, bucket.number, gap, len(segments)))
    bucket.segments += segments


def _row(change: Change, encoding: str, bucket: int, gap: int, segments: int) -> d.TensorRow:
    spec = change.delta.spec
    return d.TensorRow(
        name=spec.name,
        dtype=spec.dtype,
        shape=spec.shape,
        encoding=encoding,
        bucket=bucket,
        gap=gap,
        nnz=change.delta.nnz,
        segments=segments,
        digest=str(change.digest),
    )


def _add_dense(bucket: _Bucket, delta: TensorDelta) -> list[d.Segment]:
    _put_planes(bucket, "dense", delta.values)
    segments = []
    for start, stop in _runs(delta):
        lengths = (min(SEGMENT, stop - at) for at in range(start, stop, SEGMENT))
        segments += [d.Segment(start + SEGMENT * i, n, n) for i, n in enumerate(lengths)]
    return segments


def _runs(delta: TensorDelta) -> Iterator[tuple[int, int]]:
    """Where consecutive elements begin and end."""
    if delta.indices is None:
        yield 0, delta.spec.numel
    elif delta.nnz:
        cuts = np.flatnonzero(np.diff(delta.indices) != 1) + 1
        for run in np.split(delta.indices, cuts):
            yield int(run[0]), int(run[-1]) + 1


def _add_sparse(bucket: _Bucket, delta: TensorDelta, indices: Indices, gap: int) -> list[d.Segment]:
    numel = delta.spec.numel
    bounds = np.searchsorted(indices, np.arange(0, numel + SEGMENT, SEGMENT))
    segments = []
    for number in range(len(bounds) - 1):
        low, high = int(bounds[number]), int(bounds[number + 1])
        if low == high:
            continue
        start = number * SEGMENT
        gaps = host.encode_gaps(indices[low:high] - start, gap)
        if gap == 1:
            bucket.put("gap8", gaps)
        else:
            _put_planes(bucket, "gap16", gaps)
        exceptions, wide = _put_values(
            bucket, delta.values[low:high], absolute=bool(delta.absolute)
        )
        length = min(SEGMENT, numel - start)
        segments.append(d.Segment(start, length, high - low, gaps.size, exceptions, wide))
    return segments


def _put_values(bucket: _Bucket, values: Bits, *, absolute: bool) -> tuple[int, int]:
    if absolute:
        _put_planes(bucket, "value", values)
        return 0, 0
    split = host.split_steps(values)
    bucket.put("sign", split.negative)
    bucket.put("exception", split.exception)
    bucket.put("magnitude", split.magnitude)
    _put_planes(bucket, "wide", split.wide)
    return split.magnitude.size, split.wide.size


def _put_planes(bucket: _Bucket, stream: str, values: Bits) -> None:
    """Byte ``k`` of every element goes to plane ``k``: alike bytes side by side compress better."""
    planes = np.ascontiguousarray(values).view(np.uint8).reshape(-1, values.itemsize)
    for k in range(values.itemsize):
        bucket.put(f"{stream}.{k}", planes[:, k])


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
    return _Stream(row, dtype, shape or (sum(stored),), frames)


def _encode_raw(group: Sequence[Change]) -> _Encoded:
    encoded = _Encoded([], [], [])
    for change in group:
        delta, spec = change.delta, change.delta.spec
        if change.windows:
            raise ConfigError(f"{spec.name}: windows are not written raw")
        if delta.indices is None:
            encoded.rows.append(_row(change, d.PLAIN, 0, 0, 0))
            encoded.streams.append(_plain(spec.name, spec.dtype, spec.shape, delta.values))
            continue
        if delta.absolute.ndim or not delta.absolute:
            raise ConfigError(f"{spec.name}: raw deltas carry absolute bits, not steps")
        encoded.rows.append(_row(change, d.RAW, 0, 0, 0))
        dtype = "I32" if spec.numel < 1 << 31 else "I64"
        indices = delta.indices.astype("<i4" if dtype == "I32" else "<i8")
        encoded.streams.append(_plain(f"{spec.name}.indices", dtype, indices.shape, indices))
        encoded.streams.append(
            _plain(f"{spec.name}.values", spec.dtype, delta.values.shape, delta.values)
        )
    return encoded


def _plain(name: str, dtype: str, shape: tuple[int, ...], values: Any) -> _Stream:  # noqa: ANN401
    stream = _stream(name, dtype, shape, values.view(np.uint8), compress=False)
    return _Stream(stream.row, dtype, shape, stream.frames)


def _assemble(encoded: Sequence[_Encoded], *, compress: bool) -> EncodedPart:
    """Directory, digest of all in front of the streams, streams."""
    rows = [row for item in encoded for row in item.rows]
    streams = [stream for item in encoded for stream in item.streams]
    if not compress:  # arrays of wide elements first: then every one is aligned for a reader
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
    """The directory as it is written, once every name in the file is known to be the only one."""
    names = [row.name for row in rows]
    entries = ["__metadata__", "directory", "digest", *(stream.row.name for stream in streams)]
    for group in (names, entries):
        if len(set(group)) < len(group):
            repeated = next(name for name in group if group.count(name) > 1)
            raise ConfigError(f"{repeated!r} would be in the part twice")
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
