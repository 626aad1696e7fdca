"""A layout: how another system stores one update, and how its receiver writes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from deltachain.types import BITS_DTYPES, WIRE_DTYPES, Bits, TensorSpec
from tests.bench.chains import ChangedTensors, TensorChange


@dataclass(frozen=True, slots=True)
class StoredArray:
    name: str
    dtype: str
    values: npt.NDArray[Any]


def dump(arrays: Iterable[StoredArray], metadata: Mapping[str, str] | None) -> bytes:
    """Return the file: length, header padded to 8 bytes, data; widest dtypes first."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    order = sorted(arrays, key=lambda a: (-WIRE_DTYPES[a.dtype], a.dtype, a.name))
    end = 0
    for array in order:
        start, end = end, end + array.values.nbytes
        numel = array.values.nbytes // WIRE_DTYPES[array.dtype]
        header[array.name] = {
            "dtype": array.dtype,
            "shape": [numel],
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = (np.ascontiguousarray(array.values).data.cast("B") for array in order)
    return b"".join([len(text).to_bytes(8, "little"), text, *data])


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
    """What a receiver writes into one tensor.

    Attributes:
        positions: Where, counted in elements of ``values``'s dtype; None for the whole tensor.
        values: Unsigned integers; bytes where the layout counts bytes.
        xor: Whether ``values`` are combined with the old bits by exclusive or, or replace them.
    """

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


def gaps_of(indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.diff(indices, prepend=-1) - 1


def indices_of(gaps: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return np.cumsum(gaps, dtype=np.int64) + np.arange(gaps.size)


def _before_and_after(change: TensorChange) -> tuple[Bits, Bits]:
    size, dtype = change.numel * change.spec.itemsize, BITS_DTYPES[change.spec.itemsize]
    weights = np.full(size, FILLER, np.uint8).view(dtype)
    weights[change.indices] = change.old
    expected = weights.copy()
    expected[change.indices] = change.new
    return weights, expected
