"""Layout of PULSE: differences of rows and of columns, and new bf16 bits, one zstd-1 frame."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zstandard

from deltachain.types import TensorSpec
from tests.bench.changes import ChangedTensors, TensorChange
from tests.bench.layouts.layout import DecodedWrite, Objects, PeerLayout, Specs, changed

_DTYPES: Final[dict[str, str]] = {"uint8": "|u1", "uint16": "<u2", "int32": "<i4"}


def encode_pulse(changes: ChangedTensors) -> Objects:
    """PULSE (arXiv 2602.03839) as its code, grail, writes it by default: ``sparse_codec_v3.1``.

    A uint32 length, a JSON header with a row a tensor, and for each tensor, by name: the row of
    each change less that of the change before (uint8, or wider), its column, less that of the
    change before in the same row (uint16, or int32), and its new bits; all in one frame. Dimensions
    behind the first are one. The metadata file beside it is not counted.
    Source: grail 54d6342 (``sparse_codec.py``, ``delta_checkpoint.py``).
    """
    rows: list[dict[str, Any]] = []
    data: list[bytes] = []
    offset = 0
    for name, change in sorted(changed(changes).items()):
        row_name, row_steps = _narrow(_row_steps(change), ("uint8", "uint16", "int32"))
        col_name, col_steps = _narrow(_column_steps(change), ("uint16", "int32"))
        parts = [row_steps, col_steps, change.new.tobytes()]
        places = len(row_steps) + len(col_steps)
        rows.append(
            {
                "name": name,
                "shape": list(change.spec.shape),
                "num_nonzero": change.nnz,
                "value_dtype": "bfloat16",
                "row_dtype": row_name,
                "col_dtype": col_name,
                "indices_offset": offset,
                "indices_size": places,
                "rows_size": len(row_steps),
                "cols_size": len(col_steps),
                "values_offset": offset + places,
                "values_size": len(parts[2]),
            }
        )
        data += parts
        offset += sum(map(len, parts))
    header = json.dumps({"version": 31, "tensors": rows}, separators=(",", ":")).encode()
    content = b"".join([len(header).to_bytes(4, "little"), header, *data])
    return (zstandard.ZstdCompressor(level=1).compress(content),)


def decode_pulse(objects: Objects, specs: Specs) -> Iterator[tuple[str, DecodedWrite]]:
    content = zstandard.ZstdDecompressor().decompress(objects[0])
    start = 4 + int.from_bytes(content[:4], "little")
    for row in json.loads(content[4:start])["tensors"]:
        total = row["num_nonzero"]
        rows_at = start + row["indices_offset"]
        row_steps = np.frombuffer(content, _DTYPES[row["row_dtype"]], total, rows_at)
        cols_at = rows_at + row["rows_size"]
        col_steps = np.frombuffer(content, _DTYPES[row["col_dtype"]], total, cols_at)
        values = np.frombuffer(content, "<u2", total, start + row["values_offset"])
        indices = _indices(row_steps, col_steps, _columns(specs[row["name"]]))
        yield row["name"], DecodedWrite(indices, values, xor=False)


def _columns(spec: TensorSpec) -> int:
    return math.prod(spec.shape[1:])


def _row_steps(change: TensorChange) -> npt.NDArray[np.int64]:
    return np.diff(change.indices // _columns(change.spec), prepend=0)


def _column_steps(change: TensorChange) -> npt.NDArray[np.int64]:
    columns = change.indices % _columns(change.spec)
    same_row = _row_steps(change) == 0
    same_row[0] = False
    return columns - np.where(same_row, np.roll(columns, 1), 0)


def _indices(
    row_steps: npt.NDArray[Any], col_steps: npt.NDArray[Any], columns: int
) -> npt.NDArray[np.int64]:
    first = row_steps != 0
    first[0] = True
    passed = np.cumsum(col_steps, dtype=np.int64)
    before = (passed - col_steps)[first]
    in_row = passed - np.repeat(before, np.diff(np.flatnonzero(first), append=first.size))
    found: npt.NDArray[np.int64] = np.cumsum(row_steps, dtype=np.int64) * columns + in_row
    return found


def _narrow(steps: npt.NDArray[np.int64], names: tuple[str, ...]) -> tuple[str, bytes]:
    fits = (name for name in names if steps.max() <= np.iinfo(_DTYPES[name]).max)
    name = next(fits)
    return name, steps.astype(_DTYPES[name]).tobytes()


PULSE: Final = PeerLayout(name="PULSE v3.1, zstd-1", encode=encode_pulse, decode=decode_pulse)
