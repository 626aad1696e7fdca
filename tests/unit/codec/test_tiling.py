"""Tiles of ``max`` end where the shares of engine ranks do: a rank has all of a tile or nothing."""

import numpy as np
import pytest

from deltachain.codec.encodings.max.encoding import TILE_NBYTES, MaxEncoding, _windows, tiling
from deltachain.types import TensorSpec


def cut_tiles(spec: TensorSpec, held: np.ndarray) -> int:
    """How many tiles a rank with some ``(rows, columns)`` of a matrix has a part of."""
    columns, found = spec.shape[-1], 0
    for start, length in _windows(spec, 0, spec.numel):
        rows = held[start // columns : (start + length) // columns]
        tiles = rows.reshape(rows.shape[0], tiling(spec).cuts, -1).swapaxes(0, 1)
        for tile in tiles:
            found += bool(tile.any() and not tile.all())
    return found


def share(shape: tuple[int, int], axis: int, low: int, high: int) -> np.ndarray:
    held = np.zeros(shape, np.bool_)
    (held if axis == 0 else held.T)[low:high] = True
    return held


Model = dict[str, tuple[tuple[int, int], int]]


def shapes(model: Model) -> list[tuple[tuple[int, int], int]]:
    return list(model.values())


ROWS, COLUMNS = 0, 1

SMALL: Model = {
    "q": ((896, 896), ROWS),
    "k": ((128, 896), ROWS),
    "o": ((896, 896), COLUMNS),
    "gate": ((4864, 896), ROWS),
    "down": ((896, 4864), COLUMNS),
    "embed": ((151936, 896), ROWS),
}
"""Qwen2.5 0.5B, which has two heads of keys."""

LARGE: Model = {
    "q": ((3584, 3584), ROWS),
    "o": ((3584, 3584), COLUMNS),
    "gate": ((18944, 3584), ROWS),
    "down": ((3584, 18944), COLUMNS),
}
"""Qwen2.5 7B, which has four heads of keys."""

HUGE: Model = {
    "q": ((8192, 8192), ROWS),
    "o": ((8192, 8192), COLUMNS),
    "gate": ((28672, 8192), ROWS),
    "down": ((8192, 28672), COLUMNS),
}
"""Llama 70B."""


def check(shape: tuple[int, int], axis: int, ways: int, dtype: str = "BF16") -> None:
    spec, size = TensorSpec("w", dtype, shape), shape[axis] // ways
    for rank in range(ways):
        assert cut_tiles(spec, share(shape, axis, rank * size, (rank + 1) * size)) == 0


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3"])
@pytest.mark.parametrize(("shape", "axis"), shapes(SMALL))
def test_small_matrices_are_divided_for_two_ranks(
    shape: tuple[int, int], axis: int, dtype: str
) -> None:
    check(shape, axis, 2, dtype)


@pytest.mark.parametrize("ways", [2, 4, 8])
@pytest.mark.parametrize(("shape", "axis"), [*shapes(LARGE), ((512, 3584), ROWS)])
def test_usual_shards(shape: tuple[int, int], axis: int, ways: int) -> None:
    check(shape, axis, min(ways, 4) if shape[0] == 512 else ways)


@pytest.mark.parametrize("ways", [6, 12, 16])
@pytest.mark.parametrize(("shape", "axis"), shapes(HUGE))
def test_other_shards_of_large_matrices(shape: tuple[int, int], axis: int, ways: int) -> None:
    if shape[axis] % ways == 0:
        check(shape, axis, ways)


@pytest.mark.parametrize("ways", [2, 4, 8])
@pytest.mark.parametrize("parts", [(3072, 3072, 3072), (5120, 1280, 1280), (8192, 8192)])
def test_rows_of_several_matrices_in_one(parts: tuple[int, ...], ways: int) -> None:
    """Queries, keys and values, or both halves of a gated layer: a rank has a part of each."""
    spec = TensorSpec("qkv", "BF16", (sum(parts), 5120))
    for rank in range(ways):
        held, at = np.zeros(spec.shape, np.bool_), 0
        for rows in parts:
            size = rows // ways
            held[at + rank * size : at + (rank + 1) * size] = True
            at += rows
        if ways < 8 or parts[1] != 1280:  # eight ranks have half a head of keys each
            assert cut_tiles(spec, held) == 0


@pytest.mark.parametrize("ways", [2, 4, 8])
@pytest.mark.parametrize("vocab", [50257, 32001, 73448, 128256])
def test_vocabularies_that_engines_fill_up(vocab: int, ways: int) -> None:
    spec = TensorSpec("embed", "BF16", (vocab, 2048))
    size = (vocab + -vocab % 64) // ways
    for rank in range(ways):
        held = share((vocab, 2048), ROWS, rank * size, min((rank + 1) * size, vocab))
        assert cut_tiles(spec, held) == 0


@pytest.mark.parametrize(
    "shape",
    [
        (1,),
        (7,),
        (1, 1),
        (3, 5),
        (64, 64),
        (5000, 3),
        (2, 1 << 20),
        (1, (1 << 20) + 1),
        (8, 16, 64),
    ],
)
def test_every_element_is_in_one_window(shape: tuple[int, ...]) -> None:
    spec = TensorSpec("w", "BF16", shape)
    at = 0
    for start, length in _windows(spec, 0, spec.numel):
        assert start == at
        assert 0 < length <= 1 << 20
        at += length
    assert at == spec.numel


def test_what_two_ranks_would_cut_is_small_or_does_not_suit() -> None:
    suits, with_old = MaxEncoding().suits, MaxEncoding().encodes_with_old
    never: list[tuple[int, ...]] = [(1 << 20,), (2, 1 << 21)]
    small: list[tuple[int, ...]] = [(), (7,), (16, 16), (1 << 16,)]
    fitting: list[tuple[int, ...]] = [(64, 64), (50257, 768), (8, 64, 64), (2000, 51), (513, 64)]
    assert not any(suits(TensorSpec("w", "BF16", shape)) for shape in never)
    assert all(suits(TensorSpec("w", "BF16", shape)) for shape in fitting)
    assert all(with_old(TensorSpec("w", "BF16", shape)) for shape in fitting)
    assert all(suits(TensorSpec("w", "BF16", shape)) for shape in small)
    assert not any(with_old(TensorSpec("w", "BF16", shape)) for shape in small)
    assert with_old(TensorSpec("w", "F8_E4M3", (64, 64)))
    assert not with_old(TensorSpec("w_scale_inv", "F32", (64, 64)))
    assert with_old(TensorSpec("w", "F32", (512, 512)))
    assert not suits(TensorSpec("w", "I8", (512, 512)))


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("weight_scale", "BF16", (4096, 1)),
        ("weight_scale", "U8", (1024, 32)),
        ("weight_scale", "F8_E4M3", (4096, 256)),
        ("weight_scale_inv", "F8_E8M0", (256, 256)),
        ("weight_scale_inv", "F32", (148, 64)),
        ("k_scale", "F32", (1,)),
    ],
)
def test_scales_are_given_without_old_bits(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    spec = TensorSpec(f"model.layers.0.mlp.up_proj.{name}", dtype, shape)
    assert MaxEncoding().suits(spec)
    assert not MaxEncoding().encodes_with_old(spec)


def test_scales_beyond_a_segment_are_steps() -> None:
    spec = TensorSpec("h.0.weight_scale", "F8_E4M3", (8192, 256))
    assert not MaxEncoding().suits(spec)


def test_tiles_of_large_matrices_are_not_small() -> None:
    for shape, _ in (LARGE | HUGE).values():
        band, cuts = tiling(TensorSpec("w", "BF16", shape))
        assert band * (shape[1] // cuts) * 2 >= TILE_NBYTES
