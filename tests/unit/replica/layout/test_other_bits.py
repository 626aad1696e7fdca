"""Other bits show where each element goes."""

from __future__ import annotations

import pytest
import torch

from deltachain.replica.layout.loaded_checkpoint import other_bits

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [2, 3, 4, 7, 33])
@pytest.mark.parametrize("first", [0, 1, 96])
def test_every_element_is_another_and_no_row_or_column_its_own_mirror_image(
    dtype: torch.dtype, width: int, first: int
) -> None:
    for rows in (1, 2, 5):
        tensor = torch.full((rows, width), first).to(dtype)
        other = other_bits(tensor).float()
        assert (other != tensor.float()).all()
        assert (other[:, 0] != other[:, -1]).all()
        assert rows == 1 or (other[0] != other[-1]).all()


def test_a_number_and_a_flag_have_others_too() -> None:
    assert other_bits(torch.tensor(1.5)).item() != 1.5
    assert other_bits(torch.tensor([True, False])).tolist() == [False, True]
