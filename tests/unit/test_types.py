from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltachain.errors import ConfigError, TensorMismatchError
from deltachain.types import (
    BITS_DTYPES,
    MAX_DIMS,
    MAX_NUMEL,
    WIRE_DTYPES,
    StateDigest,
    TensorSpec,
    check_spec,
    mismatch,
)

LANES = st.integers(0, (1 << 64) - 1)
DIGESTS = st.builds(StateDigest, LANES, LANES)


@given(DIGESTS, DIGESTS, DIGESTS)
def test_state_digests_add_up_in_any_order(a: StateDigest, b: StateDigest, c: StateDigest) -> None:
    assert a + b == b + a
    assert (a + b) + c == a + (b + c)
    assert a + StateDigest() == a
    assert (a + b) - b == a
    assert a - a == StateDigest()


@given(DIGESTS)
def test_state_digests_have_one_text(digest: StateDigest) -> None:
    assert len(str(digest)) == 32
    assert StateDigest.parse(str(digest)) == digest


@given(st.text())
def test_other_texts_are_no_state_digest(text: str) -> None:
    with pytest.raises(ConfigError):
        StateDigest.parse(text[:31])


@pytest.mark.parametrize("text", ["A" * 32, "0" * 33, "0x" + "0" * 30, " " + "0" * 31, "٣" * 32])
def test_state_digests_have_one_form(text: str) -> None:
    with pytest.raises(ConfigError):
        StateDigest.parse(text)


@pytest.mark.parametrize("dtype", WIRE_DTYPES)
def test_every_dtype_has_bits_of_its_width(dtype: str) -> None:
    spec = TensorSpec("w", dtype, (3, 5))
    assert spec.bits_dtype == BITS_DTYPES[WIRE_DTYPES[dtype]]
    assert (spec.numel, spec.nbytes) == (15, 15 * spec.bits_dtype.itemsize)
    assert spec.bits_dtype.byteorder in "<=|"


@pytest.mark.parametrize("shape", [(), (0,), (0, 1 << 60), (MAX_NUMEL,), (1 << 24, 1 << 24)])
def test_shapes_up_to_the_limit_are_tensors(shape: tuple[int, ...]) -> None:
    assert TensorSpec("w", "U8", shape).numel in (0, 1, MAX_NUMEL)


@pytest.mark.parametrize("shape", [(-1,), (-2, -2), (MAX_NUMEL + 1,), (1 << 25, 1 << 24)])
def test_shapes_beyond_the_limit_are_none(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"layer\.w"):
        TensorSpec("layer.w", "U8", shape)


def test_sizes_up_to_the_limits_are_tensors() -> None:
    assert TensorSpec("w", "U8", (1,) * MAX_DIMS).numel == 1
    with pytest.raises(ConfigError, match=f"{MAX_DIMS + 1} dimensions"):
        TensorSpec("w", "U8", (1,) * (MAX_DIMS + 1))


@pytest.mark.parametrize("dtype", ["", "bf16", "F4", "C64"])
def test_dtypes_without_a_wire_form_are_refused(dtype: str) -> None:
    with pytest.raises(ConfigError, match="wire form"):
        TensorSpec("w", dtype, ())


def test_a_mismatch_names_dtype_and_shape_in_both_places() -> None:
    spec = TensorSpec("w", "BF16", (2, 3))
    assert mismatch("w", spec, "here", ("BF16", (2, 3)), "there") == ""
    assert mismatch("w", spec, "a.bin", ("F32", (5,)), "b.bin") == (
        "'w' is BF16[2, 3] in a.bin, F32[5] in b.bin"
    )
    assert mismatch("w", spec, "here", None, "there").endswith("missing in there")
    with pytest.raises(TensorMismatchError, match="missing in here") as caught:
        check_spec("w", None, "here", spec)
    assert caught.value.tensor == "w"
