from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from deltachain.codec import Part
from deltachain.types import BITS_DTYPES, WIRE_DTYPES, Bits
from tests.unit.cli.support import (
    Done,
    invoke,
    ok,
    random_state,
    read_checkpoint,
    safetensors_bytes,
    same,
    train,
    write_checkpoint,
)

ENCODINGS = ("step", "overwrite", "raw")
Tensors = dict[str, tuple[str, tuple[int, ...], Bits]]
SPECIAL = (0, 1, 0x7F, 0x80, 0x8000, 0x7FC0, 0x7FC1, 0xFFFF, 0x7F800001, 1 << 31, 1 << 63)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensors, Tensors]:
    """Two checkpoints of the same tensors, of any dtypes, shapes and bits."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    old: Tensors = {}
    new: Tensors = {}
    for number in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(sorted(WIRE_DTYPES)))
        shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
        width = BITS_DTYPES[WIRE_DTYPES[dtype]]
        numel = int(np.prod(shape))
        before = np.frombuffer(rng.bytes(numel * width.itemsize), width).copy()
        after = before.copy()
        share = draw(st.sampled_from((0.0, 0.01, 0.2, 0.6, 1.0)))
        chosen = rng.random(numel) < share
        wild = np.frombuffer(rng.bytes(numel * width.itemsize), width)
        special = np.array([s & int(np.iinfo(width).max) for s in SPECIAL], width)
        after[chosen] = np.where(rng.random(numel) < 0.5, wild, rng.choice(special, numel))[chosen]
        name = f"{draw(st.sampled_from(('a', 'weight', 'λ.b', 'x y')))}.{number}"
        old[name], new[name] = (dtype, shape, before), (dtype, shape, after)
    return old, new


@pytest.mark.parametrize("encoding", ENCODINGS)
@settings(deadline=None, max_examples=60)
@given(pair=pairs(), padding=st.integers(0, 8))
def test_diff_and_patch_round_trip_every_bit(
    encoding: str, pair: tuple[Tensors, Tensors], padding: int
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        files = [root / name for name in ("old.safetensors", "new.safetensors")]
        for file, tensors in zip(files, pair, strict=True):
            file.write_bytes(safetensors_bytes(tensors, padding=padding))
        delta, again = root / "delta.safetensors", root / "again.safetensors"
        ok("diff", *files, "--out", delta, "--encoding", encoding)
        ok("patch", files[0], delta, "--out", again)
        assert again.read_bytes() == files[1].read_bytes()  # header and all


@pytest.mark.parametrize("dtype", sorted(WIRE_DTYPES))
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_zero_becomes_minus_zero_and_a_nan_keeps_its_payload(
    dtype: str, encoding: str, tmp_path: Path
) -> None:
    width = BITS_DTYPES[WIRE_DTYPES[dtype]]
    top = 1 << (8 * width.itemsize - 1)
    before = np.zeros(64, width)
    after = before.copy()
    after[[1, 5, 63]] = np.array([top, np.iinfo(width).max, top - 1], width)
    for name, bits in (("old", before), ("new", after)):
        (tmp_path / name).write_bytes(safetensors_bytes({"x": (dtype, (8, 8), bits)}))
    ok("diff", tmp_path / "old", tmp_path / "new", "-o", tmp_path / "d", "--encoding", encoding)
    ok("patch", tmp_path / "old", tmp_path / "d", "-o", tmp_path / "again")
    assert same(read_checkpoint(tmp_path / "again"), {"x": after})


@pytest.fixture
def steps(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Two checkpoint folders and the delta between them."""
    old = random_state()
    first = write_checkpoint(tmp_path / "old", old)
    second = write_checkpoint(tmp_path / "new", train(old, 1))
    ok("diff", first, second, "--out", tmp_path / "delta")
    return first, second, tmp_path / "delta"


def test_a_folder_becomes_a_folder_with_its_other_files(
    steps: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    old, new, delta = steps
    (old / "deltachain.json").write_text("what a folder that follows says of itself")
    done = ok("patch", old, delta, "--out", tmp_path / "again", "--json")
    again = tmp_path / "again"
    assert same(read_checkpoint(again), read_checkpoint(new))
    names = {file.name for file in again.iterdir()}
    assert names == {"model.safetensors", "config.json", "tokenizer.json"}
    assert done.document["nnz"] == Part.from_bytes(delta.read_bytes()).nnz
    assert {file.name for file in tmp_path.iterdir()} == {"old", "new", "delta", "again"}


def test_a_folder_that_is_there_is_not_patched_over(steps: tuple[Path, Path, Path]) -> None:
    old, new, delta = steps
    done = invoke("patch", old, delta, "--out", new)
    assert done.code == 2
    assert "is there already" in done.stderr


def test_a_wrong_base_is_refused_and_nothing_is_written(
    steps: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    _, new, delta = steps
    for base, out in ((new, "again"), (new / "model.safetensors", "again.safetensors")):
        done = invoke("patch", base, delta, "--out", tmp_path / out)
        assert done.code == 6
        assert "does not hold the bits" in done.stderr
        assert done.stdout == ""
    assert {file.name for file in tmp_path.iterdir()} == {"old", "new", "delta"}


@pytest.mark.parametrize("encoding", ["step", "overwrite"])
def test_a_tensor_that_changed_everywhere_goes_whole(encoding: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    before, after = (np.frombuffer(rng.bytes(1 << 16), np.uint16) for _ in range(2))
    for name, bits in (("old", before), ("new", after)):
        (tmp_path / name).write_bytes(safetensors_bytes({"x": ("BF16", (1 << 15,), bits)}))
    done = ok(
        "diff", tmp_path / "old", tmp_path / "new", "-o", tmp_path / "d", "--encoding", encoding,
        "--json",
    )  # fmt: skip
    assert done.document["encodings"] == ["dense"]
    assert done.document["nbytes"] < (1 << 16) + 2000


def test_checkpoints_of_other_tensors_are_refused_by_name(tmp_path: Path) -> None:
    bits = np.zeros(4, np.uint16)
    shapes: dict[str, Tensors] = {
        "one": {"x": ("BF16", (4,), bits)},
        "dtype": {"x": ("F16", (4,), bits)},
        "shape": {"x": ("BF16", (2, 2), bits)},
        "names": {"y": ("BF16", (4,), bits)},
    }
    for name, tensors in shapes.items():
        (tmp_path / name).write_bytes(safetensors_bytes(tensors))
    for other in ("dtype", "shape", "names"):
        done = invoke("diff", tmp_path / "one", tmp_path / other, "-o", tmp_path / "d")
        assert done.code == 6
        assert "'x'" in done.stderr
        assert not (tmp_path / "d").exists()
    ok("diff", tmp_path / "one", tmp_path / "one", "-o", tmp_path / "d")
    (tmp_path / "changed").write_bytes(safetensors_bytes({"x": ("BF16", (4,), bits + 1)}))
    ok("diff", tmp_path / "one", tmp_path / "changed", "-o", tmp_path / "d")
    done = invoke("patch", tmp_path / "shape", tmp_path / "d", "-o", tmp_path / "again")
    assert done.code == 6


def test_a_raw_delta_opens_in_the_safetensors_library(tmp_path: Path) -> None:
    before = np.arange(100, dtype=np.uint32)
    after = before.copy()
    after[[3, 50]] += 7
    for name, bits in (("old", before), ("new", after)):
        (tmp_path / name).write_bytes(safetensors_bytes({"x": ("F32", (100,), bits)}))
    ok("diff", tmp_path / "old", tmp_path / "new", "-o", tmp_path / "d", "--encoding", "raw")
    with safe_open(tmp_path / "d", "np") as opened:
        assert opened.get_tensor("x.indices").tolist() == [3, 50]
        assert opened.get_tensor("x.values").view(np.uint32).tolist() == [10, 57]


def regions(data: bytes) -> Iterator[int]:
    """A few positions of every region of a part: length, header, directory, digest, streams."""
    part = Part.from_bytes(data)
    header = 8 + int.from_bytes(data[:8], "little")
    stored = sum(sum(row.stored) for row in part.directory.streams)
    edges = [0, 8, header, len(data) - stored - 32, len(data) - stored]
    for row in part.directory.streams:
        for size in row.stored:
            edges.append(edges[-1] + size)
    assert edges[-1] == len(data)
    for start, stop in pairwise(edges):
        yield from (start, (start + stop) // 2, stop - 1)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_any_flipped_bit_is_found(encoding: str, tmp_path: Path) -> None:
    old = random_state()
    first = write_checkpoint(tmp_path / "old", old) / "model.safetensors"
    second = write_checkpoint(tmp_path / "new", train(old, 1)) / "model.safetensors"
    delta, out = tmp_path / "delta", tmp_path / "again"
    ok("diff", first, second, "--out", delta, "--encoding", encoding)
    data = delta.read_bytes()
    rng = np.random.default_rng(1)
    positions = [*regions(data), *rng.integers(0, len(data), 200).tolist()]
    for number, position in enumerate(positions):
        damaged = bytearray(data)
        damaged[position] ^= 1 << int(rng.integers(8))
        delta.write_bytes(damaged)
        command = ("inspect", delta) if number % 3 == 0 else ("patch", first, delta, "--out", out)
        done: Done = invoke(*command)
        assert done.code == 5, (position, done.stderr)
        assert not out.exists()
