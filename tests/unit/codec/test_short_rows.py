"""Rows of ``max`` are stored in fewer bytes, in one way each."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltachain.codec import Part, encode_part
from deltachain.codec import container as d
from deltachain.codec.rows import with_full_rows, with_short_rows
from deltachain.errors import ConfigError
from deltachain.types import TensorSpec
from tests.format import freeze

LETTERS = st.text(alphabet="ab.0:é", max_size=6)
SEGMENT = st.builds(
    d.Segment,
    start=st.just(0),
    length=st.just(d.SEGMENT),
    nnz=st.integers(0, 1 << 62),
    gaps=st.integers(0, 1 << 62),
)
ROW = st.tuples(LETTERS, st.sampled_from(["max", "step"]), st.lists(SEGMENT, max_size=3))


def directory(rows: list[tuple[str, str, list[d.Segment]]]) -> d.Directory:
    tensors = tuple(
        d.TensorRow(
            name=name,
            dtype="BF16",
            shape=(8, 6),
            encoding=encoding,
            bucket=0,
            gap=1,
            nnz=sum(segment.nnz for segment in segments),
            segments=len(segments),
            digest="",
        )
        for name, encoding, segments in rows
    )
    columns = d.columns_of([segment for *_, segments in rows for segment in segments])
    return d.Directory(tensors=tensors, segments=columns, streams=())


@given(st.lists(ROW, max_size=5))
def test_every_directory_comes_back_from_its_short_rows(
    rows: list[tuple[str, str, list[d.Segment]]],
) -> None:
    full = directory(rows)
    stored = with_short_rows(full)
    assert with_full_rows(stored) == full
    for (name, encoding, _), row in zip(rows, stored.tensors, strict=True):
        assert (row.nnz == 0 and ":" in row.name) if encoding == "max" else row.name == name


def test_directories_without_max_are_stored_as_they_are() -> None:
    plain = directory([("a", "step", [d.Segment(0, 48, 3, 9)])])
    assert with_short_rows(plain) is plain
    assert with_full_rows(plain) is plain


def test_names_of_too_many_characters_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(d, "MAX_DIRECTORY", 4000)
    spec = TensorSpec("a" * 1000, "BF16", (8, 6))
    old = np.zeros(48, np.uint16)
    changes = [
        freeze.as_max(replace(spec, name=spec.name + letter), old, old + np.uint16(1))
        for letter in "abcd"
    ]
    assert len(Part.from_bytes(encode_part(changes[:3]).data).rows) == 3
    with pytest.raises(ConfigError, match="4004 characters"):
        encode_part(changes)


@pytest.mark.parametrize(
    ("nbytes", "nnz", "stored"),
    [(9, 8, 0), (10, 8, 2), (8, 8, 1), (0, 8, 17), (0, 0, 0), (5, 0, 10), (1, 1, 0), (0, 1, 1)],
)
def test_sizes_are_distances_from_nine_bits_a_change(nbytes: int, nnz: int, stored: int) -> None:
    one = directory([("a", "max", [d.Segment(0, 48, nnz, nbytes)])])
    assert with_short_rows(one).segments.gaps == (stored,)


def test_columns_of_different_lengths_are_an_error() -> None:
    stored = with_short_rows(directory([("a", "max", [d.Segment(0, 48, 3, 9)])]))
    shorter = msgspec.structs.replace(stored.segments, nnz=())
    with pytest.raises(ValueError, match="columns differ in length"):
        with_full_rows(msgspec.structs.replace(stored, segments=shorter))
