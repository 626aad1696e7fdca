"""Bits in a file, written by calls; and the room for them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from deltachain.filebits import WINDOW_NBYTES, FileBits
from deltachain.room import NoRoomError, check_room, fill_holes, hint_for, reserve
from deltachain.types import TensorSpec

BEFORE, AFTER = b"header: ", b"the next tensor"


def file_of(path: Path, bits: np.ndarray) -> Path:
    path.write_bytes(BEFORE + bits.tobytes() + AFTER)
    return path


@pytest.mark.parametrize("dtype", ["U8", "BF16", "F32", "U64"])
def test_elements_are_written_where_they_lie_and_nowhere_else(tmp_path: Path, dtype: str) -> None:
    spec = TensorSpec("w", dtype, (WINDOW_NBYTES + 5,))
    rng = np.random.default_rng(1)
    truth = np.frombuffer(rng.bytes(spec.nbytes), spec.bits_dtype).copy()
    place = FileBits(file_of(tmp_path / "w", truth), len(BEFORE), spec)
    window = WINDOW_NBYTES // spec.itemsize
    edges = [0, 1, window - 1, window, spec.numel - 1]
    indices = np.unique([*edges, *rng.integers(0, spec.numel, 999)])
    new = np.frombuffer(rng.bytes(indices.size * spec.itemsize), spec.bits_dtype)
    assert np.array_equal(place.bits, truth)
    place.put(indices, new)
    truth[indices] = new
    assert np.array_equal(place.bits, truth)  # the map shows it, too
    assert (tmp_path / "w").read_bytes() == BEFORE + truth.tobytes() + AFTER
    place.put(None, truth[::-1])
    assert (tmp_path / "w").read_bytes() == BEFORE + truth[::-1].tobytes() + AFTER


@pytest.mark.parametrize("indices", [np.empty(0, np.int64), None])
def test_a_tensor_without_elements_takes_none(tmp_path: Path, indices: np.ndarray | None) -> None:
    place = FileBits(file_of(tmp_path / "w", np.empty(0, "<u2")), 8, TensorSpec("w", "BF16", (0,)))
    place.put(indices, np.empty(0, "<u2"))
    assert place.bits.size == 0
    assert (tmp_path / "w").read_bytes() == BEFORE + AFTER


def test_a_map_cannot_be_written_to(tmp_path: Path) -> None:
    place = FileBits(file_of(tmp_path / "w", np.zeros(9, "u1")), 8, TensorSpec("w", "U8", (9,)))
    with pytest.raises(ValueError, match="read-only"):
        place.bits[0] = 1


def test_room_is_taken_and_holes_are_filled(tmp_path: Path) -> None:
    file = tmp_path / "w"
    file.write_bytes(b"header")
    reserve(file, 1 << 20)
    assert file.read_bytes() == b"header".ljust(1 << 20, b"\0")
    assert file.stat().st_blocks * 512 >= 1 << 20
    reserve(file, 0)


def test_holes_are_filled(tmp_path: Path) -> None:
    file = tmp_path / "w"
    with file.open("wb") as out:
        out.write(b"x" * 4096)
        out.truncate(1 << 20)
    fill_holes(file)
    assert file.read_bytes() == (b"x" * 4096).ljust(1 << 20, b"\0")
    assert file.stat().st_blocks * 512 >= 1 << 20
    (tmp_path / "empty").touch()
    fill_holes(tmp_path / "empty")


def test_what_is_missing_is_counted(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    with pytest.raises(NoRoomError) as caught:
        check_room(tmp_path, status.f_blocks * status.f_frsize * 2)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.missing >= status.f_blocks * status.f_frsize
    assert f"{caught.value.missing:,} bytes are missing" in hint_for(caught.value, tmp_path)
    check_room(tmp_path, 1)


def test_every_cause_has_its_own_hint(tmp_path: Path) -> None:
    causes = (errno.ENOSPC, errno.EFBIG, errno.EACCES, errno.EROFS, errno.EMFILE, errno.ENFILE)
    hints = {hint_for(OSError(number, "x"), tmp_path) for number in causes}
    assert len(hints) == len(causes)
    assert "" not in hints
    assert hint_for(ValueError("x"), tmp_path) == ""
