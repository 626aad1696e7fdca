"""Former layouts of slime: gaps and bf16 values over the concatenation of all tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import zstandard

from tests.bench.changes import ChangedTensors
from tests.bench.layouts.layout import (
    DecodedWrite,
    Objects,
    PeerLayout,
    Specs,
    gaps_of,
    indices_of,
)

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
