import numpy as np
import pytest
import torch

from tests.bench.chains import SyntheticChain
from tests.bench.quantised import FP8, INT8, fp8_blocks, int8_rows, quantised
from tests.bench.shapes import TINY


def weight(rows: int, cols: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, cols, generator=generator).mul_(0.02).to(torch.bfloat16)


def test_fp8_blocks_come_back_within_half_a_step() -> None:
    exact = weight(256, 384)
    codes, scales = fp8_blocks(exact)
    assert (codes.dtype, codes.shape) == (torch.float8_e4m3fn, exact.shape)
    assert (scales.dtype, tuple(scales.shape)) == (torch.float32, (2, 3))
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    # Three mantissa bits: a sixteenth of the value, or half of the smallest step (2 ** -9).
    allowed = torch.maximum(exact.float().abs() / 16, spread * 2**-10) * 1.001
    assert torch.all((codes.float() * spread - exact.float()).abs() <= allowed)
    largest = codes.float().abs().reshape(2, 128, 3, 128).amax((1, 3))
    assert torch.all(largest == 448)


def test_int8_rows_come_back_within_half_a_step() -> None:
    exact = weight(5, 77)
    codes, scales = int8_rows(exact)
    assert (codes.dtype, tuple(scales.shape)) == (torch.int8, (5, 1))
    assert torch.all((codes.float() * scales - exact.float()).abs() <= scales * 0.5001)
    assert torch.all(codes.abs().amax(1) == 127)


@pytest.mark.parametrize("quantise", [fp8_blocks, int8_rows])
def test_zeros_stay_zeros_with_a_scale_of_one(quantise: object) -> None:
    assert callable(quantise)
    codes, scales = quantise(torch.zeros(128, 128, dtype=torch.bfloat16))
    assert not codes.float().any()
    assert torch.all(scales == 1)


def test_the_last_blocks_may_be_smaller() -> None:
    exact = weight(100, 200)
    whole = torch.zeros(128, 256, dtype=torch.bfloat16)
    whole[:100, :200] = exact
    codes, scales = fp8_blocks(exact)
    expected, same = fp8_blocks(whole)
    assert torch.equal(codes.view(torch.uint8), expected[:100, :200].view(torch.uint8))
    assert torch.equal(scales, same)
    assert (tuple(codes.shape), tuple(scales.shape)) == ((100, 200), (1, 2))


@pytest.mark.parametrize(("dtype", "suffix"), [(FP8, "_scale_inv"), (INT8, "_scale")])
def test_linear_weights_become_codes_and_scales(dtype: str, suffix: str) -> None:
    step = next(SyntheticChain(seed=3, layout=TINY, warmup=1).steps(1))
    codes, specs = quantised(step, TINY.specs(), dtype)
    name = "model.layers.0.mlp.up_proj.weight"
    assert [spec.name for spec in specs] == list(codes)
    assert {name, name + suffix} <= codes.keys()
    assert not any("norm" in one or "embed" in one for one in codes)
    for spec in specs:
        for bits in codes[spec.name]:
            assert (bits.size, bits.dtype) == (spec.numel, spec.bits_dtype)
    old, new = codes[name]
    assert 0 < np.count_nonzero(old != new) < 0.02 * old.size
