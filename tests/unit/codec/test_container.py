from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from deltachain.codec.container import read_header, reader_of, write_header
from deltachain.errors import MalformedError
from deltachain.types import WIRE_DTYPES

SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
ROWS = st.lists(
    st.tuples(st.text(max_size=9), st.sampled_from(sorted(WIRE_DTYPES)), SHAPES),
    max_size=6,
    unique_by=lambda row: row[0],
)


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    size = WIRE_DTYPES[dtype]
    for dim in shape:
        size *= dim
    return size


@settings(max_examples=150, deadline=None)
@given(ROWS, st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3))
def test_headers_survive(
    rows: list[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]
) -> None:
    rows = [row for row in rows if row[0] != "__metadata__"]
    entries = [(*row, nbytes_of(*row[1:])) for row in rows]
    front = write_header(metadata, entries)
    assert len(front) % 8 == 0
    data = front + bytes(sum(entry[3] for entry in entries))
    header = read_header(reader_of(data), len(data))
    found = [(e.name, e.dtype, e.shape, e.nbytes) for e in header.entries.values()]
    assert sorted(found) == sorted(entries)
    assert dict(header.metadata) == metadata
    assert (header.nbytes, header.file_nbytes) == (len(front), len(data))


def test_headers_of_safetensors_are_read() -> None:
    data = save({"a": np.zeros((2, 3), np.float32), "b": np.ones(5, np.int8)}, {"format": "pt"})
    header = read_header(reader_of(data), len(data))
    assert {n: (e.dtype, e.shape) for n, e in header.entries.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("I8", (5,)),
    }
    assert header.metadata == {"format": "pt"}


def file_of(entries: dict[str, Any], nbytes: int) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + bytes(nbytes)


def entry(start: int, stop: int, dtype: str = "U8") -> dict[str, Any]:
    shape = [(stop - start) // WIRE_DTYPES[dtype]]
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_entries_may_be_listed_in_any_order() -> None:
    data = file_of({"b": entry(4, 8, "F32"), "a": entry(0, 4)}, 8)
    assert list(read_header(reader_of(data), len(data)).entries) == ["a", "b"]


@pytest.mark.parametrize(
    ("entries", "nbytes"),
    [
        ({"a": entry(0, 4), "b": entry(0, 4)}, 4),
        ({"a": entry(0, 4), "b": entry(2, 6)}, 6),
        ({"a": entry(0, 4), "b": entry(5, 8)}, 8),
        ({"a": entry(1, 4)}, 4),
        ({"a": entry(0, 4)}, 5),
        ({"a": entry(0, 4)}, 3),
        ({}, 1),
    ],
)
def test_entries_that_do_not_tile_the_file_are_malformed(
    entries: dict[str, Any], nbytes: int
) -> None:
    data = file_of(entries, nbytes)
    with pytest.raises(MalformedError, match="weights"):
        read_header(reader_of(data), len(data), key="weights")
