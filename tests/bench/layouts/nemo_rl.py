"""Layout of NeMo-RL's sparse refit: gaps and old XOR new, pickled by torch, zstd-1."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from tests.bench.changes import ChangedTensors, TensorChange
from tests.bench.layouts.layout import (
    DecodedWrite,
    Objects,
    PeerLayout,
    Specs,
    changed,
    gaps_of,
    indices_of,
)

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
