"""Operations on words of bits: what LLVM makes of them is what they say."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from deltachain.codec.encodings.max.classes import (
    class_table,
    load_word,
    lowest,
    popcount,
    run_mask,
    select,
    thread_scratch,
)
from deltachain.codec.encodings.max.tiles import BINS, NEVER
from deltachain.kernels.compiling import compiled

Words = npt.NDArray[np.uint64]


def sparse(seed: int, count: int, rate: float) -> Words:
    """Words whose bits are set at a rate."""
    bits = np.random.default_rng(seed).random((count, 64)) < rate
    found: Words = np.packbits(bits, axis=1, bitorder="little").view(np.uint64).reshape(-1)
    return found


def ones(word: int) -> list[int]:
    return [n for n in range(64) if word >> n & 1]


@compiled
def _select(found: Any, out: Any) -> None:
    at = 0
    for word in found:
        for rank in range(popcount(word)):
            out[at] = select(word, np.int64(rank))
            at += 1


@pytest.mark.parametrize("rate", [0.02, 0.5, 0.98, 1])
def test_a_bit_is_selected_by_its_rank(rate: float) -> None:
    found = sparse(1, 300, rate)
    expected = [n for word in found.tolist() for n in ones(word)]
    out = np.zeros(len(expected), np.int64)
    _select(found, out)
    assert out.tolist() == expected


@compiled
def _lowest(found: Any, out: Any) -> None:
    for n in range(found.shape[0]):
        out[n] = lowest(found[n])


def test_the_lowest_one_bit_has_its_number() -> None:
    found = np.array([0, 1, 2, 1 << 63, (1 << 64) - 1, 0b101000], np.uint64)
    out = np.zeros(found.size, np.int64)
    _lowest(found, out)
    assert out.tolist() == [64, 0, 1, 63, 0, 3]


@compiled
def _masks(codes: Any, at: Any, low: Any, more: Any, mask: Any) -> Any:
    return run_mask(codes, at, (low, more, mask))


@pytest.mark.parametrize(("low", "more", "mask"), [(3, 0, 255), (250, 5, 255), (3, 4, 127)])
def test_the_bytes_of_a_run_are_masked(low: int, more: int, mask: int) -> None:
    codes = np.random.default_rng(3).integers(0, 256, 80).astype(np.uint8)
    found = _masks(codes, 7, np.uint8(low), np.uint8(more), np.uint8(mask))
    inside = ((codes[7:71] - np.uint8(low)) & np.uint8(mask)) <= more
    assert ones(int(found)) == np.flatnonzero(inside).tolist()


@compiled
def _load(data: Any, at: Any) -> Any:
    return load_word(data, at)


def test_a_word_begins_at_any_byte() -> None:
    data = np.arange(1, 20, dtype=np.uint8)
    for at in range(11):
        assert int(_load(data, at)) == int.from_bytes(data[at : at + 8].tobytes(), "little")


def test_classes_are_the_bins_of_one_rate_in_runs() -> None:
    table = np.full(2 * BINS, NEVER, np.uint8)
    table[[3, 4, 7]], table[9:12] = 5, 2
    table[BINS + 3] = 1
    found = class_table(table)
    assert found.rates.tolist() == [2, 5]
    assert found.mixed.tolist() == [False, True]
    assert found.common.tolist() == [NEVER, 1]
    runs = list(zip(found.kinds.tolist(), found.lows.tolist(), found.spans.tolist(), strict=True))
    assert runs == [(0, 9, 2), (1, 3, 1), (1, 7, 0)]
    assert found.fold == 255
    assert found.by_bin[[0, 3, 7, 9, 12]].tolist() == [NEVER, 1, 1, 0, NEVER]
    table[:BINS] = np.tile(table[:128], 2)
    assert class_table(table).fold == 127


def test_memory_of_a_thread_begins_with_lines_of_the_caches() -> None:
    held = thread_scratch(100_000)
    arrays = (held.marks, held.codes, held.positions, held.tile.members, held.tile.before)
    assert all(array.ctypes.data % 64 == 0 for array in arrays)
    assert not held.marks.any()
    assert thread_scratch(1000) is held
