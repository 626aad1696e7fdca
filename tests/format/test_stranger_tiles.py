"""The encoding ``max``: a reader made from FORMAT.md alone finds what deltachain finds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from deltachain.codec import Part, encode_part
from deltachain.delta import OldBits
from deltachain.errors import MalformedError
from deltachain.types import Bits, TensorSpec
from tests.format import freeze, stranger
from tests.format.forge import take_apart
from tests.format.stranger_base import RefusedError
from tests.format.test_stranger import models

NAME = "w"
SPEC = TensorSpec(NAME, "BF16", (8, 6))
OLD: Bits = np.array([0x3C00 + 61 * n % 1024 for n in range(48)], np.uint16)


def part_of(cuts: int = 1) -> bytes:
    return freeze.tiles_beside(cuts)[0]


def test_stranger_finds_the_same_in_tensors_of_every_dtype() -> None:
    items = list(models(5))
    data = encode_part(freeze.as_max(*item) for item in items).data
    part = Part.from_bytes(data)
    theirs = stranger.read_part(data, {spec.name: old.tolist() for spec, old, _ in items})
    for spec, old, new in items:
        ours, found = part.read(spec.name, old=OldBits(old)), theirs[spec.name]
        assert list(found.indices) == np.flatnonzero(old != new).tolist()
        assert ours.indices is not None
        assert list(found.indices) == ours.indices.tolist()
        assert list(found.values) == ours.values.tolist() == (new - old)[ours.indices].tolist()


@pytest.mark.parametrize("cuts", [1, 2, 3, 6])
def test_stranger_reads_tiles_side_by_side(cuts: int) -> None:
    data = part_of(cuts)
    ours = Part.from_bytes(data).read(NAME, old=OldBits(OLD))
    found = stranger.read_part(data, {NAME: OLD.tolist()})[NAME]
    assert ours.indices is not None
    assert list(found.indices) == ours.indices.tolist() == [0, 7, 8, 20, 47]
    assert list(found.values) == ours.values.tolist() == [1, 0xFFFF, 3, 0x8000, 40]


def refusals() -> Iterator[tuple[str, Any]]:
    yield "a rate beyond 20", lambda p: edit(p, "#0.class", 120, 21)
    yield "a size beyond 31", lambda p: edit(p, "#0.class", 256 + 120, 32)
    yield "a size without a rate", lambda p: edit(p, "#0.class", 256 + 3, 0)
    yield "other old bits", lambda p: edit(p, "#0.class", 120, 0)
    yield "a tile that ends early", lambda p: cut(p, -1)
    yield "a tile that ends late", lambda p: cut(p, 1)
    yield "padding that is not zero", lambda p: edit(p, "#0.tile", -1, 0xFF)
    yield "another number of elements", lambda p: count(p, 4)
    yield "a count in the row", lambda p: p.rows[0].update(nnz=5)
    yield "no tiles", lambda p: gap(p, 0)
    yield "tiles that do not divide the columns", lambda p: gap(p, 4)
    yield "too many tiles", lambda p: gap(p, 66)
    yield "a segment that ends inside a row", lambda p: ends(p, 2, 47)
    yield "exceptions", lambda p: p.segments.update(exceptions=[1])
    yield "too many bytes", lambda p: cut(p, 400)
    yield "fewer bytes than none", lambda p: p.set_tile_nbytes(0, -1)
    yield "a size beyond 63 bits", lambda p: p.set_tile_nbytes(0, 1 << 64)
    for name in ("w", "w:", ":w", "-1:w", "+0:w", "00:w", "\u0660:w", "1:w", "0" * 5000 + ":w"):
        yield f"the name {name[:10]!r}", partial(rename, name)


def rename(name: str, pieces: Any) -> None:
    pieces.rows[0]["name"] = name


def edit(pieces: Any, stream: str, at: int, value: int) -> None:
    data = bytearray(pieces.streams[stream])
    data[at] = value
    pieces.streams[stream] = bytes(data)


def cut(pieces: Any, more: int) -> None:
    data = pieces.streams["#0.tile"]
    pieces.streams["#0.tile"] = data[:more] if more < 0 else data + bytes(more)
    pieces.set_tile_nbytes(0, pieces.tile_nbytes(0) + more)


def count(pieces: Any, nnz: int) -> None:
    nbytes = pieces.tile_nbytes(0)
    pieces.segments["nnz"] = [nnz]
    pieces.set_tile_nbytes(0, nbytes)


def gap(pieces: Any, value: int) -> None:
    pieces.rows[0]["gap"] = value


def ends(pieces: Any, tiles: int, length: int) -> None:
    gap(pieces, tiles)
    pieces.segments["length"] = [length]


@pytest.mark.parametrize("name", [name for name, _ in refusals()])
def test_both_readers_refuse(name: str) -> None:
    pieces = take_apart(part_of())
    dict(refusals())[name](pieces)
    data = pieces.build()
    with pytest.raises(MalformedError):
        Part.from_bytes(data).read(NAME, old=OldBits(OLD))
    with pytest.raises(RefusedError):
        stranger.read_part(data, {NAME: OLD.tolist()})


@pytest.mark.parametrize("name", ["2:1.x", "0:w", "6:", "06:x", "4:a", "5:"])
def test_both_readers_read_each_name_in_one_form(name: str) -> None:
    alike = [TensorSpec(name, "BF16", (8, 6)) for name in ("w.0.a", "w.0.ab", "w.1.a", "w.0:é")]
    parts = [freeze.as_max(spec, OLD, OLD ^ np.uint16(1)) for spec in alike]
    pieces = take_apart(encode_part(parts).data)
    stored = [row["name"] for row in pieces.rows]
    assert stored == ["0:w.0.a", "5:b", "2:1.a", "2:0:é"]
    old = {spec.name: OLD.tolist() for spec in alike}
    for data in (pieces.build(), encode_part(parts).data):
        assert list(Part.from_bytes(data).rows) == list(stranger.read_part(data, old)) == list(old)
    pieces.rows[3]["name"] = name
    forged = pieces.build()
    with pytest.raises(MalformedError):
        Part.from_bytes(forged)
    with pytest.raises(RefusedError):
        stranger.read_part(forged, old)


def test_both_readers_refuse_names_of_too_many_characters() -> None:
    pieces = take_apart(freeze.tiny_max())
    row = pieces.rows[0] | {"name": "0:" + "a" * (1 << 20), "segments": 0, "nnz": 0}
    longer = [row | {"name": f"{1 << 20}:{chr(0x4E00 + n)}"} for n in range(64)]
    pieces.rows[:0] = [row, *longer]
    data = pieces.build()
    assert len(data) < 1 << 20
    with pytest.raises(MalformedError, match="names of more than"):
        Part.from_bytes(data)
    with pytest.raises(RefusedError, match="names"):
        stranger.read_part(data)


def test_both_readers_refuse_a_large_tensor_without_old_bits() -> None:
    pieces = take_apart(freeze.tiny_max())
    pieces.rows[0]["shape"] = [(1 << 20) + 1]
    data = pieces.build()
    with pytest.raises(MalformedError):
        Part.from_bytes(data)
    with pytest.raises(RefusedError):
        stranger.read_part(data)


def test_sizes_of_tiles_are_refused_in_more_bytes_than_needed() -> None:
    pieces = take_apart(part_of(2))
    data = pieces.streams["#0.tile"]
    assert data[0] < 128
    for wrong in (bytes([data[0] | 128, 0]), bytes([255, 255, 255, 255, 1]), b"\x7f"):
        pieces = take_apart(part_of(2))
        pieces.streams["#0.tile"] = wrong + data[1:]
        pieces.set_tile_nbytes(0, len(wrong) + len(data) - 1)
        forged = pieces.build()
        with pytest.raises(MalformedError):
            Part.from_bytes(forged).read(NAME, old=OldBits(OLD))
        with pytest.raises(RefusedError):
            stranger.read_part(forged, {NAME: OLD.tolist()})
