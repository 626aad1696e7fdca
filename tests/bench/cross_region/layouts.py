"""What others put into a store for one version, written anew from their sources, both ways.

``bench/layouts`` of the package has more of them, to compare sizes and speeds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import torch
import zstandard
from safetensors import torch as safetensors_torch
from torch import Tensor

from deltachain.types import Indices
from tests.bench.chains import U16

Weights: TypeAlias = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class TensorChange:
    """Flat indices of a tensor, ascending, and the new bits of those elements."""

    shape: tuple[int, ...]
    indices: Indices
    bits: U16


Changes: TypeAlias = Mapping[str, TensorChange]


class Layout(Protocol):
    """How a delta is written down."""

    def key(self, version: int) -> str:
        """Where it goes."""

    def encode(self, changes: Changes, *, version: int, numel: int) -> bytes:
        """The object of one version, of a model of so many elements."""

    def decode(self, data: bytes) -> Iterator[tuple[str, Indices, U16]]:
        """Flat indices and new bits of each tensor."""


def full_file(weights: Weights) -> bytes:
    """A checkpoint in one safetensors file."""
    return safetensors_torch.save(dict(weights), {"format": "pt"})


def load_full(data: bytes, weights: Weights) -> None:
    """Copy a checkpoint into live weights."""
    for name, tensor in safetensors_torch.load(data).items():
        weights[name].copy_(tensor)


class TrlGaps:
    """TRL's later drafts, encoding ``gap_delta``: gaps and values of each tensor, not compressed.

    Source: TRL pull requests 5932 and 5937, branches delta-weight-sync-v2 3253247 and -v3 aa9adc3.
    Their masks may miss changes; here every change is in.
    """

    def key(self, version: int) -> str:
        """See :class:`Layout`; version 0 here is their step 1."""
        return f"deltas/step_{version + 1:06d}.safetensors"

    def encode(self, changes: Changes, *, version: int, numel: int) -> bytes:
        """``{name}.idx`` as uint16, uint32 where a gap does not fit, and ``{name}.val``."""
        tensors: dict[str, Tensor] = {}
        for name, change in changes.items():
            tensors[f"{name}.idx"] = torch.from_numpy(_gaps(change.indices))
            tensors[f"{name}.val"] = _bf16(change.bits)
        nnz = sum(change.indices.size for change in changes.values())
        metadata = {
            "format": "sparse_weight_patch",
            "version": "1",
            "sparse": "True",
            "model_version": str(version + 1),
            "num_changed_params": str(len(changes)),
            "total_changed_elements": str(nnz),
            "total_elements": str(numel),
            "sparsity": repr(1 - nnz / numel),
            "encoding": "gap_delta",
        }
        return safetensors_torch.save(tensors, metadata)

    def decode(self, data: bytes) -> Iterator[tuple[str, Indices, U16]]:
        """See :class:`Layout`."""
        tensors = safetensors_torch.load(data)
        for name in tensors:
            if name.endswith(".idx"):
                inner = name.removesuffix(".idx")
                yield inner, _positions(tensors[name].numpy()), _bits(tensors[f"{inner}.val"])


_POSITIONS: Final = "__positions__"
_VALUES: Final = "__values__"


class SlimeDeltasZstd:
    """slime's former ``deltas_zstd``: the gaps and values of a bucket, all of it one zstd-1 frame.

    A bucket of theirs is larger than any delta here, so a version is one file. Source: slime's
    ``update_weight_from_distributed_delta.py`` and ``docker/patch/v0.5.12.post1/sglang.patch``.
    """

    def key(self, version: int) -> str:
        """See :class:`Layout`."""
        return f"weight_v{version:06d}/rank0000_flush000000.safetensors"

    def encode(self, changes: Changes, *, version: int, numel: int) -> bytes:  # noqa: ARG002
        """Positions as bytes, values as bf16, and where each tensor's lie in them."""
        positions: list[bytes] = []
        rows: list[dict[str, Any]] = []
        at = element = 0
        for name, change in changes.items():
            if not change.indices.size:
                continue
            gaps = _gaps(change.indices)
            row: dict[str, Any] = {"name": name, "dtype": "bfloat16", "shape": list(change.shape)}
            row |= {"pos_start": at, "pos_end": at + gaps.nbytes, "pos_width": gaps.itemsize}
            row |= {"val_start": element, "val_end": element + gaps.size}
            positions.append(gaps.tobytes())
            rows.append(row)
            at, element = at + gaps.nbytes, element + gaps.size
        values = [change.bits for change in changes.values()]
        tensors = {
            _POSITIONS: torch.frombuffer(bytearray(b"".join(positions)), dtype=torch.uint8),
            _VALUES: _bf16(np.concatenate(values)),
        }
        metadata = {
            "encoding": "deltas_zstd",
            "params": json.dumps(rows),
            "prev_version": str(version - 1),
            "current_version": str(version),
        }
        file = safetensors_torch.save(tensors, metadata)
        return zstandard.ZstdCompressor(level=1, threads=-1).compress(file)

    def decode(self, data: bytes) -> Iterator[tuple[str, Indices, U16]]:
        """See :class:`Layout`."""
        file = zstandard.ZstdDecompressor().decompress(data)
        tensors = safetensors_torch.load(file)
        positions, values = tensors[_POSITIONS].numpy(), _bits(tensors[_VALUES])
        for row in json.loads(_metadata(file)["params"]):
            blob = positions[row["pos_start"] : row["pos_end"]]
            gaps = blob.view(f"<u{row['pos_width']}")
            yield row["name"], _positions(gaps), values[row["val_start"] : row["val_end"]]


def _metadata(file: bytes) -> dict[str, str]:
    header = json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])
    found: dict[str, str] = header["__metadata__"]
    return found


def _gaps(indices: Indices) -> Any:
    """Unchanged elements before each change, in the narrowest width of theirs that fits."""
    gaps = np.diff(indices, prepend=-1) - 1
    return gaps.astype("<u4" if gaps.size and gaps.max() > 0xFFFF else "<u2")


def _positions(gaps: Any) -> Indices:
    indices: Indices = np.cumsum(gaps.astype(np.int64) + 1) - 1
    return indices


def _bf16(bits: U16) -> Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def _bits(values: Tensor) -> U16:
    bits: U16 = values.view(torch.int16).numpy().view(np.uint16)
    return bits
