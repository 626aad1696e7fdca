"""Encoding of deltas as the bytes of one part (FORMAT.md 3 and 4)."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice, pairwise
from typing import Final

import msgspec
import numpy as np

from deltachain.codec import container as d
from deltachain.codec.container import write_header
from deltachain.codec.encodings import EncodedTensor, Encoding
from deltachain.codec.encodings.dense import DenseEncoding, PlainEncoding, RawEncoding
from deltachain.codec.encodings.sparse import OverwriteEncoding, StepEncoding
from deltachain.codec.frames import (
    BucketWriter,
    StoredFrame,
    StreamContent,
    deflate_directory,
    largest_frame,
)
from deltachain.codec.rows import has_compact, share, with_short_rows
from deltachain.delta import OldBits, TensorDelta
from deltachain.errors import ConfigError
from deltachain.format.keys import DIGEST_HEX, object_digest
from deltachain.threads import Pool, cores
from deltachain.types import WIRE_DTYPES, StateDigest

_STEP, _OVERWRITE, _DENSE = StepEncoding(), OverwriteEncoding(), DenseEncoding()
_RAW, _PLAIN = RawEncoding(), PlainEncoding()

BUCKET: Final = 1 << 26
"""Elements of the tensors in one bucket, twice as many of one byte; a larger tensor has a bucket of
its own."""

TURNS: Final = 8
"""Changes of the element width from tensor to tensor above which a width has one bucket."""

MAX_TURNS: Final = 1  # the same in parts with an encoding that is compact
SMALL: Final = 1 << 22
"""Bytes of a part before compression below which threads cost more than they save."""

DIGEST_NBYTES: Final = DIGEST_HEX // 2  # size of the digest entry, in bytes
FORMAT: Final = "1"
NO_METADATA: Final[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True)
class Change:
    """One tensor's change, as input of a part.

    Attributes:
        digest: State digest of these elements; for a sparse delta, minus that of their old bits.
        windows: Whether a delta with indices sets whole windows of a tensor, whatever their old
            bits, and is not sparse.
        old: Function that reads the bits before the change, for an encoding that needs them.
        may_be_step: Whether an encoding that needs old bits is replaced by ``step`` where that
            takes fewer bytes: where changes repeat, as in columns that change in every row, and
            where old bits say little of what changes.
    """

    delta: TensorDelta
    digest: StateDigest
    windows: bool = False
    encoding: Encoding | None = None
    old: Callable[[], OldBits] | None = None
    may_be_step: bool = False


@dataclass(frozen=True, slots=True)
class EncodedPart:
    """One immutable payload object."""

    content: memoryview
    directory: str  # blake3 of all bytes before the streams, as stored in the file
    nnz: int
    encodings: tuple[str, ...]  # sorted names of all encodings in the part

    @property
    def digest(self) -> str:
        """The blake3 of the content, computed by each call."""
        return object_digest(self.content)

    @property
    def data(self) -> bytes:
        """A copy of the content."""
        return bytes(self.content)


@dataclass(frozen=True, slots=True)
class _Encoded:
    rows: list[d.TensorRow]
    segments: list[d.Segment]
    streams: list[StreamContent]


def encode_part(
    changes: Iterable[Change], *, raw: bool = False, metadata: Mapping[str, str] = NO_METADATA
) -> EncodedPart:
    """Encode tensor deltas as one part.

    By default, steps are encoded as ``step``, absolute bits as ``overwrite`` and dense deltas as
    ``dense``; with ``raw`` nothing is compressed, and they are encoded as ``raw`` and ``plain``,
    which any safetensors reader can open. Changes are in the order of the tensor table.
    ``metadata`` extends the metadata of the part.
    """
    groups, numbers = _buckets(list(changes), raw=raw)
    with Pool(cores()) as pool:
        encode = partial(_encode_bucket, raw=raw)
        apply = pool.map if len(groups) > 1 and not raw else map
        encoded = list(apply(encode, range(len(groups)), groups))
        return _assemble(encoded, numbers, pool, metadata, compress=not raw)


def _buckets(changes: Sequence[Change], *, raw: bool) -> tuple[list[list[Change]], list[int]]:
    """Divide tensors into buckets of one element width; return them, and the bucket of each tensor.

    Tensors of a bucket are consecutive. Where codes and scales take turns, as in a quantised model,
    a bucket for each turn would cost more than the changes: there, one bucket a width is filled at
    a time, and one of all widths for compact encodings. Tensors of a raw part share nothing.
    """
    compact = [bool(change.encoding and change.encoding.compact) for change in changes]
    widths = [
        0 if of_all else change.delta.spec.itemsize
        for change, of_all in zip(changes, compact, strict=True)
    ]
    turns = [0, *accumulate(one != other for one, other in pairwise(widths))]
    most = MAX_TURNS if any(compact) else TURNS
    groups = widths if turns[-1] > most and not raw else turns
    buckets: list[list[Change]] = []
    numbers: list[int] = []
    filled: dict[int, tuple[int, float]] = {}
    for change, group in zip(changes, groups[: len(changes)], strict=True):
        number, numel = filled.get(group, (-1, 0.0))
        spec = change.delta.spec
        more = spec.numel / 2 if spec.itemsize == 1 else spec.numel
        if number < 0 or numel + more > BUCKET:
            number, numel = len(buckets), 0.0
            buckets.append([])
        buckets[number].append(change)
        numbers.append(number)
        filled[group] = number, numel + more
    return buckets, numbers


def _encode_bucket(number: int, group: Sequence[Change], *, raw: bool) -> _Encoded:
    out, encoded = BucketWriter(), _Encoded([], [], [])
    for change in group:
        encoding = change.encoding or _fitting(change, raw=raw)
        if encoding.own_arrays and not raw:
            raise ConfigError(f"{change.delta.spec.name}: {encoding.name} is never compressed")
        encoding, tensor = _encode_change(change, encoding, out)
        bucket = 0 if encoding.own_arrays else number
        encoded.rows.append(_row(change, encoding, bucket, tensor))
        encoded.segments.extend(tensor.segments)
    for array in out.arrays:
        encoded.streams.append(
            StreamContent.join(array.name, [array.data], dtype=array.dtype, shape=array.shape)
        )
    encoded.streams.extend(_streams(number, out))
    return encoded


def _encode_change(
    change: Change, encoding: Encoding, out: BucketWriter
) -> tuple[Encoding, EncodedTensor]:
    """Append a change to a bucket; return the encoding that was used."""
    out.old = change.old() if encoding.needs_old and change.old else None
    if not (encoding.needs_old and change.may_be_step):
        return encoding, encoding.encode(change.delta, out)
    before = out.lengths()
    tensor = encoding.encode(change.delta, out)
    alone = BucketWriter()
    step = _STEP.encode(change.delta, alone)
    if _stored_nbytes(alone) >= sum(segment.gaps for segment in tensor.segments):
        return encoding, tensor
    out.cut(before)
    out.extend(alone)
    return _STEP, step


def _streams(number: int, out: BucketWriter) -> Iterator[StreamContent]:
    for name, pieces in sorted(out.pieces.items()):
        full = d.stream_name(number, name)
        stream = StreamContent.join(full, pieces, in_bits=d.in_bits(name))
        if stream.nbytes:
            yield stream


def _stored_nbytes(out: BucketWriter) -> int:
    pairs = ((stream, number) for stream in _streams(0, out) for number in range(len(stream.sizes)))
    return sum(len(stream.frame(number, compress=True).stored) for stream, number in pairs)


def _fitting(change: Change, *, raw: bool) -> Encoding:
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


def _in_order(
    encoded: Sequence[_Encoded], numbers: Sequence[int]
) -> tuple[list[d.TensorRow], list[d.Segment]]:
    rest = [(iter(bucket.rows), iter(bucket.segments)) for bucket in encoded]
    rows: list[d.TensorRow] = []
    segments: list[d.Segment] = []
    for number in numbers:
        rows_left, segments_left = rest[number]
        row = next(rows_left)
        rows.append(row)
        segments.extend(islice(segments_left, row.segments))
    return rows, segments


def _assemble(
    encoded: Sequence[_Encoded],
    numbers: Sequence[int],
    pool: Pool,
    metadata: Mapping[str, str],
    *,
    compress: bool,
) -> EncodedPart:
    """Join the directory, the digest of all bytes before the streams, and the streams.

    Frames are copied, as they are made, behind room for the largest possible front: a join at the
    end would hold all of them twice.
    """
    all_rows, in_rows = _in_order(encoded, numbers)
    rows = share(all_rows)
    segments = d.columns_of(in_rows)
    streams = [stream for item in encoded for stream in item.streams]
    if not compress:  # wide elements first, so that every array is aligned
        streams.sort(key=lambda s: -WIRE_DTYPES[s.dtype])
    _refuse_duplicates([row.name for row in rows])
    _refuse_duplicates(["__metadata__", "directory", "digest", *(s.name for s in streams)])

    def front(stream_rows: Sequence[d.StreamRow], *, largest: bool = False) -> bytes:
        document = d.Directory(tensors=tuple(rows), segments=segments, streams=tuple(stream_rows))
        return _front(document, streams, metadata, compress=compress, largest=largest)

    room = len(front([_largest_row(stream) for stream in streams], largest=True)) + DIGEST_NBYTES
    frames = _frames(streams, pool, compress=compress)
    content = np.empty(room + sum(sum(map(largest_frame, s.sizes)) for s in streams), np.uint8)
    at, stream_rows = room, []
    for stream in streams:
        stored, digests = [], []
        for frame in (next(frames) for _ in stream.sizes):
            nbytes = len(frame.stored)
            content[at : at + nbytes] = np.frombuffer(frame.stored, np.uint8)
            stored.append(nbytes)
            digests.append(frame.digest)
            at += nbytes
        stream_rows.append(_row_of(stream, stored, digests))
    start = front(stream_rows)
    digest = object_digest(start)
    before = start + bytes.fromhex(digest)
    content[room - len(before) : room] = np.frombuffer(before, np.uint8)
    data = content[room - len(before) : at].data
    encodings = tuple(sorted({row.encoding for row in rows}))
    return EncodedPart(data, digest, sum(row.nnz for row in rows), encodings)


def _frames(
    streams: Sequence[StreamContent], pool: Pool, *, compress: bool
) -> Iterator[StoredFrame]:
    """Yield the frames of all streams in order; make a few ahead if that pays."""
    wanted = ((stream, number) for stream in streams for number in range(len(stream.sizes)))
    make = partial(_frame, compress=compress)
    if sum(stream.nbytes for stream in streams) < SMALL:
        return map(make, wanted)
    return pool.ordered(make, wanted, ahead=2 * cores())


def _frame(wanted: tuple[StreamContent, int], *, compress: bool) -> StoredFrame:
    stream, number = wanted
    return stream.frame(number, compress=compress)


def _largest_row(stream: StreamContent) -> d.StreamRow:
    """Return the row of a stream with the most digits that its frames can need."""
    stored = [largest_frame(nbytes) for nbytes in stream.sizes]
    return _row_of(stream, stored, ["0" * DIGEST_HEX] * len(stored))


def _row_of(stream: StreamContent, stored: Sequence[int], digests: Sequence[str]) -> d.StreamRow:
    return d.StreamRow(
        name=stream.name, stored=tuple(stored), raw=stream.sizes, digests=tuple(digests)
    )


def _front(
    directory: d.Directory,
    streams: Sequence[StreamContent],
    metadata: Mapping[str, str],
    *,
    compress: bool,
    largest: bool,
) -> bytes:
    """Return the bytes before the digest; or at least as many, for the largest sizes."""
    document = msgspec.json.encode(with_short_rows(directory))
    if largest:
        stored = bytes(largest_frame(len(document)))
    else:
        _check_size(document, directory)
        stored = _stored(document, directory, compress=compress)
    fields = {
        **metadata,
        "deltachain": FORMAT,
        "compression": "zstd" if compress else "none",
        "directory_nbytes": str(len(document) if compress else len(stored)),
    }
    entries: list[tuple[str, str, tuple[int, ...], int]] = [
        ("directory", "U8", (len(stored),), len(stored)),
        ("digest", "U8", (DIGEST_NBYTES,), DIGEST_NBYTES),
    ]
    for stream, row in zip(streams, directory.streams, strict=True):
        nbytes = sum(row.stored)
        entries.append((stream.name, stream.dtype, (nbytes,) if compress else stream.shape, nbytes))
    return write_header(fields, entries) + stored


def _stored(document: bytes, directory: d.Directory, *, compress: bool) -> bytes:
    """Return a directory as it is stored; where bytes matter more than time, in fewer bytes."""
    if not compress:
        return document + b" " * (-len(document) % 8)
    smallest = has_compact(directory.tensors)
    return deflate_directory(document, smallest=smallest)


def _refuse_duplicates(names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"duplicate name {repeated!r} in one part")


def _check_size(document: bytes, directory: d.Directory) -> None:
    characters = sum(len(row.name) for row in directory.tensors)
    if max(len(document), characters) > d.MAX_DIRECTORY:
        raise ConfigError(
            f"a directory of {len(document)} bytes, and names of {characters} characters: at most "
            f"{d.MAX_DIRECTORY} of each",
            hint="write smaller parts",
        )
