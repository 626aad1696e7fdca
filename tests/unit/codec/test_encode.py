from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
from safetensors.numpy import load
from typing_extensions import override

from deltachain.codec import ENCODINGS, Change, Part, encode, encode_part
from deltachain.codec import container as directory
from deltachain.codec.container import read_header, reader_of
from deltachain.codec.encodings import BucketWriter, EncodedTensor, OldBits
from deltachain.codec.encodings.sparse import StepEncoding
from deltachain.delta import TensorDelta
from deltachain.errors import ConfigError
from deltachain.types import WIRE_DTYPES, StateDigest, TensorSpec

Make = Callable[..., Change]


def test_equal_deltas_make_equal_files(make: Make) -> None:
    changes = [make("a", [1, 2], [0, 9], numel=10), make("b", [3], width=4)]
    assert encode_part(changes).data == encode_part(iter(changes)).data
    assert encode_part(changes).data != encode_part(changes[::-1]).data


def test_safetensors_lists_every_entry(make: Make) -> None:
    data = encode_part([make("a", [1, 300], [0, 9], numel=10)]).data
    assert set(load(data)) == {
        *("directory", "digest", "#0.gap8", "#0.sign", "#0.exception"),
        *("#0.magnitude", "#0.wide.0", "#0.wide.1"),
    }


def test_raw_parts_open_in_safetensors(make: Make) -> None:
    changes = [
        make("bytes", [1, 2, 3], width=1),
        make("w", [7, 8], [1, 5], width=4, numel=9, absolute=True),
        make("empty", [], width=8),
    ]
    found = load(encode_part(changes, raw=True).data)
    assert found["w.indices"].tolist() == [1, 5]
    assert found["w.values"].view(np.uint32).tolist() == [7, 8]
    assert found["bytes"].tolist() == [1, 2, 3]
    assert found["empty"].shape == (0,)


class OverOldBits(StepEncoding):
    """Steps, from an encoding that asks for old bits."""

    needs_old = True
    given: ClassVar[list[OldBits | None]] = []

    @override
    def encode(
        self, delta: TensorDelta, out: BucketWriter, old: OldBits | None = None
    ) -> EncodedTensor:
        self.given.append(old)
        return super().encode(delta, out)


def test_old_bits_are_read_for_encodings_that_need_them_only(make: Make) -> None:
    change, old = make("a", [1, 2], [0, 9], numel=10), OldBits(np.zeros(10, np.uint16))
    read = Mock(return_value=old)
    encode_part([replace(change, old=read)])
    read.assert_not_called()
    encode_part([replace(change, old=read, encoding=OverOldBits())])
    encode_part([replace(change, encoding=OverOldBits())])
    read.assert_called_once_with()
    assert OverOldBits.given == [old, None]


def test_an_encoding_has_no_segments_streams_and_arrays_unless_it_says_so(make: Make) -> None:
    part = Part.from_bytes(encode_part([make("a", [1, 2], [0, 9], numel=10)]).data)
    row, segments = part.rows["a"], part.reader("a").segments
    raw, step = ENCODINGS.get("raw"), ENCODINGS.get("step")
    assert not raw.fits_segment(row, segments[0])
    assert not raw.streams(row, segments)
    assert not step.arrays(row)


def test_raw_arrays_are_aligned(make: Make) -> None:
    changes = [make(f"t{width}", [1, 2, 3], width=width) for width in (1, 2, 8, 4, 1)]
    changes[-1] = make("odd", [1], [0], width=1, numel=1, absolute=True)
    data = encode_part(changes, raw=True).data
    entries = directory_entries(data)
    assert {name: start % size for name, (start, size) in entries.items()} == dict.fromkeys(
        entries, 0
    )


def directory_entries(data: bytes) -> dict[str, tuple[int, int]]:
    header = read_header(reader_of(data), len(data))
    return {e.name: (e.start, WIRE_DTYPES[e.dtype]) for e in header.entries.values()}


def test_a_part_of_nothing_is_a_part() -> None:
    part = Part.from_bytes(encode_part([]).data)
    part.verify()
    assert (list(part), part.nnz, dict(part.rows)) == ([], 0, {})


def test_buckets_end_where_the_element_width_changes(make: Make) -> None:
    widths = (2, 2, 1, 2, 8, 8)
    changes = [make(f"t{n}", [n + 1], width=width) for n, width in enumerate(widths)]
    part = Part.from_bytes(encode_part(changes).data)
    assert [row.bucket for row in part.rows.values()] == [0, 0, 1, 2, 3, 3]


@pytest.mark.parametrize("absolute", [False, True])
def test_widths_that_take_turns_have_a_bucket_each(
    make: Make, monkeypatch: pytest.MonkeyPatch, absolute: bool
) -> None:
    widths = (2, 2, 1, 2, 8, 1, 8, 2)
    changes = [
        make(f"t{n}", [n + 1, 3], [n, 30 + n], width=width, numel=40, absolute=absolute)
        for n, width in enumerate(widths)
    ]
    each_turn = encode_part(changes).data
    monkeypatch.setattr(encode, "TURNS", 5)
    data = encode_part(changes).data
    assert len(data) < len(each_turn)
    part = Part.from_bytes(data)
    assert [row.bucket for row in part.rows.values()] == [0, 0, 1, 0, 2, 1, 2, 0]
    assert list(part.rows) == [change.delta.spec.name for change in changes]
    part.verify()
    for change in changes:
        found = part.read(change.delta.spec.name)
        assert np.array_equal(found.values, change.delta.values)
        assert found.indices is not None
        assert change.delta.indices is not None
        assert np.array_equal(found.indices, change.delta.indices)


def test_buckets_end_where_they_are_full(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "BUCKET", 100)
    numels = (60, 40, 1, 99, 500, 1)
    changes = [make(f"t{n}", [1], [0], numel=numel) for n, numel in enumerate(numels)]
    part = Part.from_bytes(encode_part(changes).data)
    assert [row.bucket for row in part.rows.values()] == [0, 0, 1, 1, 2, 3]
    part.verify()


def test_sparse_tensors_take_wide_gaps(make: Make) -> None:
    sparse, denser = (
        make("a", [1] * 2, [0, 9], numel=1000),
        make("b", [1] * 3, [0, 1, 2], numel=1000),
    )
    part = Part.from_bytes(encode_part([sparse, denser]).data)
    assert [row.gap for row in part.rows.values()] == [2, 1]


def test_steps_and_absolute_bits_do_not_mix_in_a_part() -> None:
    delta = TensorDelta(
        spec=TensorSpec("w", "U8", (4,)),
        indices=np.arange(2),
        values=np.ones(2, np.uint8),
        absolute=np.array([True, False]),
    )
    for raw in (False, True):
        with pytest.raises(ConfigError, match="w"):
            encode_part([Change(delta, StateDigest())], raw=raw)


def test_steps_are_not_written_raw(make: Make) -> None:
    with pytest.raises(ConfigError, match="absolute"):
        encode_part([make("w", [1], [0], numel=4)], raw=True)


@pytest.mark.parametrize("raw", [False, True])
def test_a_tensor_is_in_a_part_once(make: Make, *, raw: bool) -> None:
    with pytest.raises(ConfigError, match="'w'"):
        encode_part([make("w", [1]), make("v", [1]), make("w", [2])], raw=raw)


@pytest.mark.parametrize("name", ["w.values", "w.indices", "directory", "digest", "__metadata__"])
def test_raw_names_that_collide_are_refused(make: Make, name: str) -> None:
    sparse = make("w", [1], [0], numel=4, absolute=True)
    with pytest.raises(ConfigError, match=name):
        encode_part([sparse, make(name, [1])], raw=True)
    Part.from_bytes(encode_part([sparse, make(name, [1])]).data).verify()


def test_directories_beyond_the_limit_are_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encode_part([make("w", [1])]).data
    assert Part.from_bytes(data).nnz == 1
    monkeypatch.setattr(directory, "MAX_DIRECTORY", 300)
    with pytest.raises(ConfigError, match="smaller parts"):
        encode_part([make("w", [1])])


def test_only_the_frames_of_a_tensor_are_read(make: Make) -> None:
    names = [f"t{n}" for n in range(4)]
    changes = [make(name, [n + 1] * 600_000, width=1) for n, name in enumerate(names)]
    data = encode_part(changes).data
    reads: list[tuple[int, int]] = []

    def read_at(start: int, length: int) -> bytes:
        reads.append((start, length))
        return data[start : start + length]

    part = Part(read_at, len(data))
    opened = len(reads)
    part.read("t3")
    frames = [row for row in part.directory.streams if row.name == "#0.dense.0"]
    ends = [sum(frames[0].stored[:n]) for n in range(len(frames[0].stored) + 1)]
    start = len(data) - sum(frames[0].stored)
    assert len(frames[0].stored) == 3
    assert reads[opened:] == [
        (start + a, b - a) for a, b in list(pairwise(ends))[1:]
    ]  # of 2.4 MB, the last 1.4
