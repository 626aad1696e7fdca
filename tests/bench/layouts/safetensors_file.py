"""A safetensors file in memory: the container of several layouts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deltachain.types import WIRE_DTYPES


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
