import torch

from tests.bench.quantised import fp8_blocks, int8_rows


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


def test_the_last_blocks_may_be_smaller() -> None:
    exact = weight(100, 200)
    whole = torch.zeros(128, 256, dtype=torch.bfloat16)
    whole[:100, :200] = exact
    codes, scales = fp8_blocks(exact)
    expected, same = fp8_blocks(whole)
    assert torch.equal(codes.view(torch.uint8), expected[:100, :200].view(torch.uint8))
    assert torch.equal(scales, same)
    assert (tuple(codes.shape), tuple(scales.shape)) == ((100, 200), (1, 2))
