"""Changes that repeat, as in columns that change in every row: both encodings make use of it."""

import numpy as np
import numpy.typing as npt
import pytest
import zstandard

from deltachain.codec import Part
from deltachain.codec.container import read_header
from deltachain.codec.encode import Change, encode_part
from deltachain.codec.encodings.max.encoding import MaxEncoding
from deltachain.codec.frames import STREAM_PARAMETERS
from deltachain.delta import OldBits, TensorDelta
from deltachain.format.keys import digest_key
from deltachain.kernels import host
from deltachain.types import Bits, TensorSpec
from tests.support.files import reader_of

ROWS, COLUMNS = 256, 2048
DICE = np.random.default_rng(5)
Indices = npt.NDArray[np.int64]


def in_columns(count: int, share: float = 1.0) -> Indices:
    """Return some columns of all rows, and of their elements a share."""
    columns = np.sort(DICE.choice(COLUMNS, count, replace=False))
    found = (np.arange(ROWS)[:, None] * COLUMNS + columns).ravel()
    return found[DICE.random(found.size) < share]


def anywhere(share: float) -> Indices:
    return np.flatnonzero(DICE.random(ROWS * COLUMNS) < share)


def weights() -> Bits:
    values = DICE.normal(0, 0.02, ROWS * COLUMNS).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def change(name: str, indices: Indices, old: Bits | None = None) -> Change:
    """Return a change by small steps, with old bits as ``max``."""
    spec = TensorSpec(name, "BF16", (ROWS, COLUMNS))
    steps = DICE.choice(np.array([1, 1, 1, 2, 3, -1, -1, -1], np.int16), indices.size)
    delta = TensorDelta(spec=spec, indices=indices, values=steps.view(np.uint16))
    digest = host.digest(digest_key(spec), delta.values)
    if old is None:
        return Change(delta, digest)
    return Change(delta, digest, encoding=MaxEncoding(), old=lambda: OldBits(old), may_be_step=True)


def bits_each(data: bytes, indices: Indices) -> float:
    return 8 * len(data) / indices.size


@pytest.mark.parametrize("indices", [in_columns(300), in_columns(300, 0.9), anywhere(0.01)])
def test_no_frame_is_larger_than_zstd_makes_it_either_way(indices: Indices) -> None:
    data = encode_part([change("w", indices)]).data
    entries = read_header(reader_of(data), len(data)).entries
    parameters = zstandard.ZstdCompressionParameters(**STREAM_PARAMETERS, write_content_size=1)
    ways = [
        zstandard.ZstdCompressor(level=1),
        zstandard.ZstdCompressor(compression_params=parameters),
    ]
    for row in Part.from_bytes(data).directory.streams:
        (nbytes,), start = row.stored, entries[row.name].start
        content = zstandard.decompress(data[start : start + nbytes])
        assert nbytes == min(len(way.compress(content)) for way in ways)


@pytest.mark.parametrize("is_max", [False, True])
def test_columns_that_change_in_every_row_cost_little_more_than_their_steps(is_max: bool) -> None:
    indices = in_columns(300)
    found = encode_part([change("w", indices, weights() if is_max else None)])
    assert bits_each(found.data, indices) < 2.6  # 2.44 is the entropy of a step
    assert found.encodings == ("step",)


def test_tensors_are_step_or_max_each_and_share_tables_all_the_same() -> None:
    old = [weights() for _ in range(5)]
    where = [anywhere(0.01), in_columns(300), anywhere(0.01), in_columns(200), anywhere(0.01)]
    changes = [change(f"w{n}", where[n], old[n]) for n in range(5)]
    found = encode_part(changes)
    part = Part.from_bytes(found.data)
    part.verify()
    names = ["max", "step", "max", "step", "max"]
    assert [row.encoding for row in part.rows.values()] == names
    assert found.encodings == ("max", "step")
    for one, bits in zip(changes, old, strict=True):
        delta = part.read(one.delta.spec.name, old=OldBits(bits))
        assert delta.indices is not None
        assert one.delta.indices is not None
        assert np.array_equal(delta.indices, one.delta.indices)
        assert np.array_equal(delta.values, one.delta.values)
    apart = sum(len(encode_part([one]).data) for one in changes)
    assert len(found.data) < apart
