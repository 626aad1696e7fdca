import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load
from typing_extensions import override

from deltachain.codec import Change, Part, encode, encode_part
from deltachain.codec import container as directory
from deltachain.codec.container import read_header, write_header
from deltachain.codec.encodings import BucketWriter, EncodedTensor, OldBits
from deltachain.codec.encodings.sparse import StepEncoding
from deltachain.codec.frames import FRAME, BytePlane, StreamContent, inflate
from deltachain.delta import TensorDelta
from deltachain.errors import ConfigError, MalformedError
from deltachain.format.keys import object_digest
from deltachain.kernels import numba_kernels
from deltachain.types import BITS_DTYPES, WIRE_DTYPES
from tests.contract import reference
from tests.support.files import reader_of

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


@settings(max_examples=150)
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


@pytest.mark.parametrize("dtype", BITS_DTYPES.values(), ids=str)
def test_copy_plane_is_that_of_the_reference(dtype: Any) -> None:
    rng = np.random.default_rng(3)
    for size in (0, 1, 4097):
        bits = rng.integers(0, np.iinfo(dtype).max, size, dtype, endpoint=True)
        bits.flags.writeable = False
        for k in range(bits.itemsize):
            expected, found = np.empty(size, np.uint8), np.empty(size, np.uint8)
            reference.copy_plane_(expected, bits, k)
            assert expected.tolist() == [int(b) >> (8 * k) & 255 for b in bits]
            numba_kernels.copy_plane_(found, bits, k)
            np.testing.assert_array_equal(found, expected)


def test_frames_are_cut_across_pieces() -> None:
    rng = np.random.default_rng(4)
    values = [rng.integers(0, 1 << 16, n, np.uint16) for n in (3, FRAME - 1, 0, FRAME + 70, 5)]
    plain = rng.integers(0, 256, 1000, np.uint8)
    stream = StreamContent.join("s", [plain, *(BytePlane(v, 1) for v in values), plain])
    expected = np.concatenate([plain, *((v >> 8).astype(np.uint8) for v in values), plain])
    assert stream.nbytes == expected.size == sum(stream.sizes)
    assert max(stream.sizes) == FRAME
    frames = [stream.frame(number, compress=True) for number in range(len(stream.sizes))]
    found = b"".join(inflate(frame.stored, frame.nbytes) for frame in frames)
    assert found == expected.tobytes()
    assert [frame.digest for frame in frames] == [object_digest(frame.stored) for frame in frames]
    end = stream.nbytes
    for start, stop in ((0, 1), (999, 1001), (FRAME, 2 * FRAME), (end - 9, end)):
        np.testing.assert_array_equal(stream.read(start, stop), expected[start:stop])


def test_bits_are_packed_across_pieces() -> None:
    rng = np.random.default_rng(5)
    pieces = [rng.random(n) < 0.5 for n in (1, 8 * FRAME - 3, 13, 7)]
    stream = StreamContent.join("sign", pieces, in_bits=True)
    expected = np.packbits(np.concatenate(pieces), bitorder="little")
    frames = [stream.frame(number, compress=False) for number in range(len(stream.sizes))]
    assert b"".join(frame.stored for frame in frames) == expected.tobytes()
    assert stream.sizes == (FRAME, expected.size - FRAME)


RACE = """
import sys, threading
import msgspec
from deltachain.codec import container as directory
from deltachain.format.documents import decode

sys.setswitchinterval(1e-6)
empty = {name: [] for name in directory.Directory.__struct_fields__}
row = {"tensors": [{"name": "a", "dtype": "BF16", "shape": [1], "nnz": 1}]}
documents = [msgspec.json.encode(one) for one in (empty, row)]
start = threading.Barrier(16)

def race():
    start.wait()
    for document in documents:
        try:
            decode(document, directory.Directory)
        except msgspec.MsgspecError:
            pass

threads = [threading.Thread(target=race) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.full
def test_the_first_parts_of_a_process_are_opened_by_many_threads() -> None:
    """With ``msgspec.json.decode(document, type=Directory)`` one run of six ends with SIGSEGV."""
    codes = [
        subprocess.run([sys.executable, "-c", RACE], check=False).returncode for _ in range(12)
    ]
    assert codes == [0] * 12


Make = Callable[..., Change]


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
    def encode(self, delta: TensorDelta, out: BucketWriter) -> EncodedTensor:
        self.given.append(out.old)
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


def test_raw_arrays_are_aligned(make: Make) -> None:
    changes = [make(f"t{width}", [1, 2, 3], width=width) for width in (1, 2, 8, 4, 1)]
    changes[-1] = make("odd", [1], [0], width=1, numel=1, absolute=True)
    data = encode_part(changes, raw=True).data
    for entry in read_header(reader_of(data), len(data)).entries.values():
        assert entry.start % WIRE_DTYPES[entry.dtype] == 0, entry.name


def test_a_part_of_nothing_is_a_part() -> None:
    part = Part.from_bytes(encode_part([]).data)
    part.verify()
    assert (list(part), part.nnz, dict(part.rows)) == ([], 0, {})


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


@pytest.mark.parametrize(
    ("widths", "numels", "buckets"),
    [
        ((2, 2, 1, 2, 8, 8), (1,) * 6, [0, 0, 1, 2, 3, 3]),
        ((2,) * 6, (60, 40, 1, 99, 500, 1), [0, 0, 1, 1, 2, 3]),
    ],
    ids=["where the element width changes", "where they are full"],
)
def test_buckets_end(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    widths: tuple[int, ...],
    numels: tuple[int, ...],
    buckets: list[int],
) -> None:
    monkeypatch.setattr(encode, "BUCKET", 100)
    pairs = enumerate(zip(widths, numels, strict=True))
    changes = [make(f"t{n}", [1], [0], width=width, numel=numel) for n, (width, numel) in pairs]
    part = Part.from_bytes(encode_part(changes).data)
    assert [row.bucket for row in part.rows.values()] == buckets
    part.verify()


def test_sparse_tensors_take_wide_gaps(make: Make) -> None:
    changes = [make("a", [1] * 2, [0, 9], numel=1000), make("b", [1] * 3, [0, 1, 2], numel=1000)]
    part = Part.from_bytes(encode_part(changes).data)
    assert [row.gap for row in part.rows.values()] == [2, 1]


def test_steps_and_absolute_bits_do_not_mix_and_steps_are_not_written_raw(make: Make) -> None:
    change = make("w", [1, 1], [0, 1], width=1, numel=4)
    mixed = replace(change.delta, absolute=np.array([True, False]))
    for raw in (False, True):
        with pytest.raises(ConfigError, match="w"):
            encode_part([replace(change, delta=mixed)], raw=raw)
    with pytest.raises(ConfigError, match="absolute"):
        encode_part([change], raw=True)


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
    assert Part.from_bytes(encode_part([make("w", [1])]).data).nnz == 1
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
