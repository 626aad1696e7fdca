"""Operations on words of bits: what LLVM makes of them is what they say."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("numba")

from deltachain.codec.encodings.max import decoder, words
from deltachain.codec.encodings.max.classes import class_table, thread_scratch
from deltachain.codec.encodings.max.tiles import BINS, NEVER
from deltachain.codec.encodings.max.words import (
    count_before,
    count_up_to,
    load_word,
    nonzero_words,
    popcount,
)
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
            out[0, at] = decoder._select(word, np.int64(rank))
            out[1, at] = decoder._select_counted(word, np.int64(rank))
            at += 1


@pytest.mark.parametrize("rate", [0.02, 0.5, 0.98, 1])
def test_both_ways_to_select_a_bit_give_the_bit_of_its_rank(rate: float) -> None:
    found = sparse(1, 300, rate)
    expected = [n for word in found.tolist() for n in ones(word)]
    out = np.zeros((2, len(expected)), np.int64)
    _select(found, out)
    assert out.tolist() == [expected, expected]


@compiled
def _count(found: Any, sums: Any, most: Any) -> Any:
    total = count_before(found, 1, sums, 2)
    return total, count_up_to(sums, 2, most), nonzero_words(found, 1)


@pytest.mark.parametrize("rate", [0.002, 0.1, 0.5, 1])
def test_the_ones_before_each_of_64_words_are_counted(rate: float) -> None:
    found = sparse(2, 66, rate)
    each = np.bitwise_count(found[1:65]).astype(np.int64)
    before = np.cumsum(each) - each
    for most in (0, 1, int(each.sum()) // 2, 4095, 4096):
        sums = np.full(67, 7, np.uint16)
        total, up_to, nonzero = _count(found, sums, most)
        assert total == each.sum()
        assert sums.tolist() == [7, 7, *before.tolist(), 7]
        assert up_to == (before <= most).sum()
        assert ones(int(nonzero)) == np.flatnonzero(each).tolist()


@compiled
def _load(data: Any, at: Any) -> Any:
    return load_word(data, at)


def test_a_word_begins_at_any_byte() -> None:
    data = np.arange(1, 20, dtype=np.uint8)
    for at in range(11):
        assert int(_load(data, at)) == int.from_bytes(data[at : at + 8].tobytes(), "little")


def test_bits_are_deposited_only_where_the_processor_does_so_in_one_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("numba.core.config.CPU_FEATURES", None)
    monkeypatch.setattr("numba.core.config.CPU_NAME", None)
    for name, features, expected in (
        ("znver5", {"bmi2": True}, True),
        ("znver2", {"bmi2": True}, False),
        ("x86-64", {"bmi2": False}, False),
        ("neoverse-v2", {}, False),
    ):
        monkeypatch.setattr("llvmlite.binding.get_host_cpu_name", partial(str, name))
        monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", partial(dict, features))
        assert words._has_deposit() is expected
    monkeypatch.setattr("numba.core.config.CPU_FEATURES", "+bmi,+bmi2")
    assert words._has_deposit()
    monkeypatch.setattr("numba.core.config.CPU_FEATURES", "")  # for the plainest processors
    assert not words._has_deposit()


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
