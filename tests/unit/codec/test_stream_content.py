"""Streams are joined a frame at a time, whatever they are pieced together from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deltachain.codec.frames import FRAME, BytePlane, StreamContent, inflate
from deltachain.format.keys import object_digest
from deltachain.kernels import jit, reference
from deltachain.types import BITS_DTYPES


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
            jit.copy_plane_(found, bits, k)
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
    for start, stop in (
        (0, 1),
        (999, 1001),
        (FRAME, 2 * FRAME),
        (stream.nbytes - 9, stream.nbytes),
    ):
        np.testing.assert_array_equal(stream.read(start, stop), expected[start:stop])


def test_bits_are_packed_across_pieces() -> None:
    rng = np.random.default_rng(5)
    pieces = [rng.random(n) < 0.5 for n in (1, 8 * FRAME - 3, 13, 7)]
    stream = StreamContent.join("sign", pieces, in_bits=True)
    expected = np.packbits(np.concatenate(pieces), bitorder="little")
    frames = [stream.frame(number, compress=False) for number in range(len(stream.sizes))]
    assert b"".join(frame.stored for frame in frames) == expected.tobytes()
    assert stream.sizes == (FRAME, expected.size - FRAME)
