"""Tiles of ``max`` end where the shares of engine ranks do: a rank has all of a tile or nothing."""

import numpy as np
import pytest

from deltachain.codec.encodings.max.encoding import TILE_NBYTES, MaxEncoding, _windows, tiling
from deltachain.types import TensorSpec

ROWS, COLUMNS = 0, 1
Matrix = tuple[tuple[int, int], int]
"""A shape, and the axis that ranks divide."""

SMALL: list[Matrix] = [
    ((896, 896), ROWS),
    ((128, 896), ROWS),
    ((896, 896), COLUMNS),
    ((4864, 896), ROWS),
    ((896, 4864), COLUMNS),
    ((151936, 896), ROWS),
]
"""Qwen2.5 0.5B, which has two heads of keys."""

LARGE: list[Matrix] = [
    ((3584, 3584), ROWS),
    ((3584, 3584), COLUMNS),
    ((18944, 3584), ROWS),
    ((3584, 18944), COLUMNS),
]
"""Qwen2.5 7B, which has four heads of keys."""

HUGE: list[Matrix] = [
    ((8192, 8192), ROWS),
    ((8192, 8192), COLUMNS),
    ((28672, 8192), ROWS),
    ((8192, 28672), COLUMNS),
]
"""Llama 70B."""

SHARDS = [
    *((*matrix, 2, dtype) for matrix in SMALL for dtype in ("BF16", "F8_E4M3")),
    *((*matrix, ways, "BF16") for matrix in LARGE for ways in (2, 4, 8)),
    *((*matrix, ways, "BF16") for matrix in HUGE for ways in (6, 12, 16)),
    *(((512, 3584), ROWS, ways, "BF16") for ways in (2, 4)),
    *(((151936, 3584), ROWS, ways, "BF16") for ways in (2, 4, 8)),
]


def cut_tiles(spec: TensorSpec, held: np.ndarray) -> int:
    """How many tiles a rank with some ``(rows, columns)`` of a matrix has a part of."""
    columns, found = spec.shape[-1], 0
    for start, length in _windows(spec, 0, spec.numel):
        assert start % columns == length % columns == 0
        rows = held[start // columns : (start + length) // columns]
        tiles = rows.reshape(rows.shape[0], tiling(spec).cuts, -1).swapaxes(0, 1)
        for tile in tiles:
            found += bool(tile.any() and not tile.all())
    return found


def share(shape: tuple[int, int], axis: int, low: int, high: int) -> np.ndarray:
    held = np.zeros(shape, np.bool_)
    (held if axis == ROWS else held.T)[low:high] = True
    return held


@pytest.mark.parametrize(
    ("shape", "axis", "ways", "dtype"),
    [row for row in SHARDS if row[0][row[1]] % row[2] == 0],
)
def test_a_matrix_is_divided_between_ranks(
    shape: tuple[int, int], axis: int, ways: int, dtype: str
) -> None:
    spec, size = TensorSpec("w", dtype, shape), shape[axis] // ways
    for rank in range(ways):
        assert cut_tiles(spec, share(shape, axis, rank * size, (rank + 1) * size)) == 0


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


WINDOWED = [(1,), (7,), (1, 1), (3, 5), (64, 64), (5000, 3)]


@pytest.mark.parametrize("shape", [*WINDOWED, (2, 1 << 20), (1, (1 << 20) + 1), (8, 16, 64)])
def test_every_element_is_in_one_window(shape: tuple[int, ...]) -> None:
    spec = TensorSpec("w", "BF16", shape)
    at = 0
    for start, length in _windows(spec, 0, spec.numel):
        assert start == at
        assert 0 < length <= 1 << 20
        at += length
    assert at == spec.numel


@pytest.mark.parametrize(
    ("how", "dtype", "shapes"),
    [
        ("not at all", "BF16", [(1 << 20,), (2, 1 << 21)]),
        ("not at all", "I8", [(512, 512)]),
        ("alone", "BF16", [(), (7,), (16, 16), (1 << 16,)]),
        ("with old bits", "BF16", [(64, 64), (50257, 768), (8, 64, 64), (2000, 51), (513, 64)]),
        ("with old bits", "F8_E4M3", [(64, 64)]),
        ("with old bits", "F32", [(512, 512)]),
    ],
)
def test_which_tensors_suit_and_need_the_bits_before(
    how: str, dtype: str, shapes: list[tuple[int, ...]]
) -> None:
    for shape in shapes:
        check_suits(how, TensorSpec("w", dtype, shape))


def check_suits(how: str, spec: TensorSpec) -> None:
    assert MaxEncoding().suits(spec) == (how != "not at all")
    if how != "not at all":
        assert MaxEncoding().encodes_with_old(spec) == (how == "with old bits")


@pytest.mark.parametrize(
    ("how", "name", "dtype", "shape"),
    [
        ("alone", "weight_scale", "BF16", (4096, 1)),
        ("alone", "weight_scale", "U8", (1024, 32)),
        ("alone", "weight_scale", "F8_E4M3", (4096, 256)),
        ("alone", "weight_scale_inv", "F8_E8M0", (256, 256)),
        ("alone", "weight_scale_inv", "F32", (148, 64)),
        ("alone", "k_scale", "F32", (1,)),
        ("not at all", "weight_scale", "F8_E4M3", (8192, 256)),  # beyond a segment
    ],
)
def test_scales_are_given_without_old_bits(
    how: str, name: str, dtype: str, shape: tuple[int, ...]
) -> None:
    check_suits(how, TensorSpec(f"model.layers.0.mlp.up_proj.{name}", dtype, shape))


def test_tiles_of_large_matrices_are_not_small() -> None:
    for shape, _ in (*LARGE, *HUGE):
        band, cuts = tiling(TensorSpec("w", "BF16", shape))
        assert band * (shape[1] // cuts) * 2 >= TILE_NBYTES
