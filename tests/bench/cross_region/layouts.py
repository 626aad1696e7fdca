"""What others put into a store for one version, written anew from their sources, both ways."""

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
    shape: tuple[int, ...]
    indices: Indices
    bits: U16


Changes: TypeAlias = Mapping[str, TensorChange]


class Layout(Protocol):
    def key(self, version: int) -> str: ...

    def encode(self, changes: Changes, *, version: int, numel: int) -> bytes: ...

    def decode(self, data: bytes) -> Iterator[tuple[str, Indices, U16]]: ...


def full_file(weights: Weights) -> bytes:
    return safetensors_torch.save(dict(weights), {"format": "pt"})


def load_full(data: bytes, weights: Weights) -> None:
    for name, tensor in safetensors_torch.load(data).items():
        weights[name].copy_(tensor)


class TrlGaps:
    def key(self, version: int) -> str:
        return f"deltas/step_{version + 1:06d}.safetensors"

    def encode(self, changes: Changes, *, version: int, numel: int) -> bytes:
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
        tensors = safetensors_torch.load(data)
        for name in tensors:
            if name.endswith(".idx"):
                inner = name.removesuffix(".idx")
                yield inner, _positions(tensors[name].numpy()), _bits(tensors[f"{inner}.val"])


_POSITIONS: Final = "__positions__"
_VALUES: Final = "__values__"


class SlimeDeltasZstd:
    def key(self, version: int) -> str:
        return f"weight_v{version:06d}/rank0000_flush000000.safetensors"

    def encode(self, changes: Changes, *, version: int, numel: int) -> bytes:  # noqa: ARG002
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
