"""Size of an update in the formats of other systems, in bytes.

Each function is written from a description of the format and only counts bytes; it contains no code
of the other system. Undescribed parts of a format are omitted and documented, which favours the
other system.

Each docstring names the described code. ``tests/unit/bench/test_layouts.py`` compares with the
sizes written by that code on equal chains.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard

from deltachain.bench.chains import U16, Step
from deltachain.types import WIRE_DTYPES, Indices


@dataclass(frozen=True, slots=True)
class TensorChange:
    """The changes of one tensor.

    Attributes:
        numel: Elements of the tensor.
        indices: Flat indices of the changed elements, strictly increasing.
        old: Their bf16 bits before.
        new: Their bf16 bits after.
    """

    numel: int
    indices: Indices
    old: U16
    new: U16


ChangedTensors: TypeAlias = Mapping[str, TensorChange]
"""Changes by tensor name, in checkpoint order; a tensor may have none."""

HeaderEntry: TypeAlias = tuple[str, str, int]
"""Tensor of a safetensors file: name, dtype, elements."""


def changes_of(step: Step) -> dict[str, TensorChange]:
    """Compare the bits of every tensor of ``step``."""
    changes = {}
    for name, (old, new) in step.items():
        indices = np.flatnonzero(old != new)
        changes[name] = TensorChange(old.size, indices, old[indices], new[indices])
    return changes


def trl_v1(changes: ChangedTensors) -> int:
    """TRL's first draft: ``{name}.indices`` int32 and ``{name}.values`` bf16, not compressed.

    48 bits a change and a safetensors header. Source: TRL PR 5417, branch delta-weight-sync
    d6504b7, the whole file including its metadata.
    """
    entries: list[HeaderEntry] = []
    for name, change in changes.items():
        entries.append((f"{name}.indices", "I32", change.indices.size))
        entries.append((f"{name}.values", "BF16", change.indices.size))
    extra = {"changed_params": json.dumps(list(changes))}
    return _safetensors_nbytes(entries, _trl_metadata(changes) | extra)


def trl_gap(changes: ChangedTensors) -> int:
    """TRL's later drafts: gaps as uint16, or uint32 where one does not fit, and bf16 values.

    32 bits a change and a safetensors header. Source: TRL PRs 5932 and 5937 (encoding
    ``gap_delta``), branches delta-weight-sync-v2 3253247 and -v3 aa9adc3, the whole file.
    """
    entries: list[HeaderEntry] = []
    for name, change in changes.items():
        dtype = "U32" if np.any(_gaps(change.indices) > 0xFFFF) else "U16"
        entries.append((f"{name}.idx", dtype, change.indices.size))
        entries.append((f"{name}.val", "BF16", change.indices.size))
    return _safetensors_nbytes(entries, _trl_metadata(changes) | {"encoding": "gap_delta"})


def slime_xor(changes: ChangedTensors) -> int:
    """Default of slime: old XOR new of every byte of a changed tensor, a zstd-1 frame a tensor.

    Counts the uint8 tensors of the safetensors file, its header with a digest of 32 hexadecimal
    digits a tensor, and the weight map of the index file. Source: slime 624b824a8
    (``update_weight_from_disk_delta.py``; miles 31f1ca961 writes the same).
    """
    frames = {name: _zstd(_xor_bytes(change)) for name, change in _changed(changes).items()}
    return _slime_nbytes(frames, "xor")


def slime_overwrite(changes: ChangedTensors) -> int:
    """Overwrite mode of slime: changed *bytes* of a tensor, one zstd-1 frame a tensor.

    A frame holds a uint32 count, that many uint32 byte positions, and the new bytes. Files,
    header and index as in `slime_xor`, same source.
    """
    frames = {name: _zstd(_changed_bytes(change)) for name, change in _changed(changes).items()}
    return _slime_nbytes(frames, "overwrite")


def skyrl_xor(changes: ChangedTensors) -> int:
    """SkyRL: the zstd-1 frames of `slime_xor` in safetensors files.

    Counts the frames and a plain safetensors header, not the manifest, whose layout is not
    described; on an 18 M element model it is about 9 kB of 0.53 MB.
    Source: SkyRL a9564572e (``delta_checkpoint.py``; its compression level is 1 as called).
    """
    frames = {name: _zstd(_xor_bytes(change)) for name, change in _changed(changes).items()}
    return _safetensors_nbytes([(name, "U8", size) for name, size in frames.items()], None)


def slime_deltas(changes: ChangedTensors) -> int:
    """Former ``deltas`` encoding of slime: uint16 gaps and bf16 values, 32 bits a change.

    Counts the two streams over the concatenation of all tensors, no header. A gap that does not
    fit takes one more gap for each 65535 skipped: the source says nothing, this is the cheapest.
    Source: slime ``docker/patch/v0.5.12.post1/sglang.patch`` (DeltaSpec).
    """
    return sum(stream.nbytes for stream in _delta_streams(changes))


def slime_deltas_zstd(changes: ChangedTensors) -> int:
    """Former ``deltas_zstd`` of slime: the two streams of `slime_deltas`, a zstd-1 frame each.

    Source: as `slime_deltas`.
    """
    return sum(_zstd(stream) for stream in _delta_streams(changes))


LAYOUTS: Final[dict[str, Callable[[ChangedTensors], int]]] = {
    "TRL v1: int32 + bf16": trl_v1,
    "TRL v2/v3: u16 gap + bf16": trl_gap,
    "slime xor, zstd-1": slime_xor,
    "slime overwrite, zstd-1": slime_overwrite,
    "SkyRL xor, zstd-1": skyrl_xor,
    "slime deltas: u16 gap + bf16": slime_deltas,
    "slime deltas, zstd-1": slime_deltas_zstd,
}
"""Name for a table -> bytes of one update."""


def bits_per_change(nbytes: int, changes: ChangedTensors) -> float:
    """Payload bits over changed elements."""
    return 8 * nbytes / sum(change.indices.size for change in changes.values())


def _changed(changes: ChangedTensors) -> dict[str, TensorChange]:
    return {name: change for name, change in changes.items() if change.indices.size}


def _zstd(stream: npt.NDArray[Any]) -> int:
    return len(zstandard.ZstdCompressor(level=1).compress(np.ascontiguousarray(stream).data))


def _gaps(indices: Indices) -> Indices:
    """Unchanged elements before each change."""
    return np.diff(indices, prepend=-1) - 1


def _xor_bytes(change: TensorChange) -> npt.NDArray[np.uint8]:
    """Old XOR new of the whole tensor: uint8, little-endian elements of two bytes."""
    dense = np.zeros(change.numel, "<u2")
    dense[change.indices] = change.old ^ change.new
    return dense.view(np.uint8)


def _changed_bytes(change: TensorChange) -> npt.NDArray[np.uint8]:
    positions = np.flatnonzero(_xor_bytes(change)).astype("<u4")
    count = np.array([positions.size], "<u4")
    new = np.zeros(change.numel, "<u2")
    new[change.indices] = change.new
    values = new.view(np.uint8)[positions]
    return np.concatenate([count.view(np.uint8), positions.view(np.uint8), values])


def _delta_streams(changes: ChangedTensors) -> tuple[U16, U16]:
    """Gaps and new bits over the concatenation of all tensors."""
    starts = np.cumsum([0, *(change.numel for change in changes.values())])
    indices = np.concatenate(
        [change.indices + start for change, start in zip(changes.values(), starts, strict=False)]
    )
    gaps = _gaps(indices)
    escapes = gaps // 0xFFFF
    stream = np.full(gaps.size + int(escapes.sum()), 0xFFFF, np.uint16)
    stream[np.cumsum(escapes) + np.arange(gaps.size)] = gaps % 0xFFFF
    return stream, np.concatenate([change.new for change in changes.values()])


def _trl_metadata(changes: ChangedTensors) -> dict[str, str]:
    nnz = sum(change.indices.size for change in changes.values())
    numel = sum(change.numel for change in changes.values())
    return {
        "format": "sparse_weight_patch",
        "version": "1",
        "sparse": "True",
        "model_version": "2",
        "num_changed_params": str(len(changes)),
        "total_changed_elements": str(nnz),
        "total_elements": str(numel),
        "sparsity": repr(1 - nnz / numel),
    }


def _slime_nbytes(frames: Mapping[str, int], encoding: str) -> int:
    digest = "0" * 32
    file = _safetensors_nbytes(
        [(name, "U8", size) for name, size in frames.items()], dict.fromkeys(frames, digest)
    )
    index = {
        "metadata": {
            "version": 2,
            "base_version": 1,
            "delta_encoding": encoding,
            "compression_format": "zstd",
            "checksum_format": "xxh3-128",
        },
        "weight_map": dict.fromkeys(frames, "model-00001-of-00001.safetensors"),
    }
    return file + len(json.dumps(index))


def _safetensors_nbytes(entries: Iterable[HeaderEntry], metadata: Mapping[str, str] | None) -> int:
    """Size of a safetensors file: length, header padded to 8 bytes, data; widest dtypes first."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, numel in sorted(entries, key=lambda e: (-WIRE_DTYPES[e[1]], e[1], e[0])):
        start, end = end, end + WIRE_DTYPES[dtype] * numel
        header[name] = {"dtype": dtype, "shape": [numel], "data_offsets": [start, end]}
    text = len(json.dumps(header, separators=(",", ":")))
    return 8 + -(-text // 8) * 8 + end
