"""Layouts that compare checkpoints as bytes, a zstd-1 frame a tensor; any dtype."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zstandard

from tests.bench.changes import ChangedTensors, TensorChange
from tests.bench.layouts.layout import DecodedWrite, Objects, PeerLayout, Specs, changed
from tests.bench.layouts.safetensors_file import StoredArray, dump, load

FILE: Final = "model-00001-of-00001.safetensors"


def encode_slime_xor(changes: ChangedTensors) -> Objects:
    """Default of slime: old XOR new of every byte of a changed tensor.

    A safetensors file of uint8 tensors with a digest of 32 hexadecimal digits a tensor (zeros
    here), and the index file. Source: slime 624b824a8 (``update_weight_from_disk_delta.py``; miles
    31f1ca961 writes the same).
    """
    return _with_index(_frames(changes, _xor_bytes), "xor")


def encode_slime_overwrite(changes: ChangedTensors) -> Objects:
    """Overwrite mode of slime: the changed *bytes* of a tensor.

    A frame holds a uint32 count, that many uint32 byte positions, and the new bytes. Files,
    digests and source as in `encode_slime_xor`.
    """
    return _with_index(_frames(changes, _changed_bytes), "overwrite")


def encode_skyrl(changes: ChangedTensors) -> Objects:
    """SkyRL: the frames of `encode_slime_xor` in a plain safetensors file.

    Without the manifest, whose layout is not described; on an 18 M element model it is about 9 kB
    of 0.53 MB. Source: SkyRL a9564572e (``delta_checkpoint.py``; its compression level is 1 as
    called).
    """
    frames = _frames(changes, _xor_bytes)
    return (dump([StoredArray(name, "U8", frame) for name, frame in frames.items()], None),)


def encode_modelexpress(changes: ChangedTensors) -> Objects:
    """ModelExpress: the frames of `encode_slime_xor`, with an adler32 a tensor and an index.

    A safetensors file of uint8 tensors whose metadata is an adler32 of 8 hexadecimal digits a
    tensor (zeros here), and a compact index with sorted keys. Source: ModelExpress 008f0da
    (``modelexpress_rl/train/methods/canonical_delta.py``) and its docs/S3_DELTA_WEIGHT_REFIT.md.
    """
    frames = _frames(changes, _xor_bytes)
    arrays = [StoredArray(name, "U8", frame) for name, frame in frames.items()]
    index = {
        "metadata": {
            "base_version": "v1",
            "checksum_format": "adler32",
            "compression_format": "zstd",
            "delta_encoding": "xor",
            "version": "v2",
        },
        "weight_map": dict.fromkeys(sorted(frames), "model-00000-of-00001.safetensors"),
    }
    file = dump(arrays, dict.fromkeys(frames, "0" * 8))
    return (file, json.dumps(index, separators=(",", ":")).encode())


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


def _frames(
    changes: ChangedTensors, content: Callable[[TensorChange], npt.NDArray[np.uint8]]
) -> dict[str, npt.NDArray[np.uint8]]:
    compressor = zstandard.ZstdCompressor(level=1)
    return {
        name: np.frombuffer(compressor.compress(content(change).data), np.uint8)
        for name, change in changed(changes).items()
    }


def _inflate(frame: memoryview) -> bytes:
    return zstandard.ZstdDecompressor().decompress(frame)


def _xor_bytes(change: TensorChange) -> npt.NDArray[np.uint8]:
    dense = np.zeros(change.numel, change.new.dtype)
    dense[change.indices] = change.old ^ change.new
    return dense.view(np.uint8)


def _changed_bytes(change: TensorChange) -> npt.NDArray[np.uint8]:
    width = change.spec.itemsize
    difference = (change.old ^ change.new).view(np.uint8).reshape(-1, width)
    element, byte = np.nonzero(difference)
    positions = (change.indices[element] * width + byte).astype("<u4")
    values = change.new.view(np.uint8).reshape(-1, width)[element, byte]
    total = np.array([positions.size], "<u4")
    return np.concatenate([total.view(np.uint8), positions.view(np.uint8), values])


def _with_index(frames: Mapping[str, npt.NDArray[np.uint8]], encoding: str) -> Objects:
    arrays = [StoredArray(name, "U8", frame) for name, frame in frames.items()]
    index: dict[str, Any] = {
        "metadata": {
            "version": 2,
            "base_version": 1,
            "delta_encoding": encoding,
            "compression_format": "zstd",
            "checksum_format": "xxh3-128",
        },
        "weight_map": dict.fromkeys(frames, FILE),
    }
    return (dump(arrays, dict.fromkeys(frames, "0" * 32)), json.dumps(index).encode())


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
