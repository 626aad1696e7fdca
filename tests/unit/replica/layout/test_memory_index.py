"""Who holds which elements, where several tensors view one storage."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deltachain.replica.layout.members import MemoryIndex, overlap


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_views_of_one_storage_are_tied_where_they_have_an_element_in_common(device: str) -> None:
    whole = torch.zeros(4, 6, device=device)
    holders = MemoryIndex([("all", whole), ("one", whole[:2]), ("other", whole[2:])])
    assert holders.overlapping(whole[0]) == {"all", "one"}
    assert holders.overlapping(whole[1:3]) == {"all", "one", "other"}
    assert holders.in_storage_of(whole[0]) == {"all", "one", "other"}
    assert holders.tied(frozenset({"one"})) == {"all", "one"}
    assert holders.tied(frozenset({"one", "elsewhere"})) == {"all", "one", "elsewhere"}
    assert holders.overlapping(torch.zeros(4, 6, device=device)) == frozenset()


def cases() -> list[tuple[Tensor, Tensor, bool]]:
    whole = torch.zeros(4, 6)
    return [
        (whole, whole.t(), True),
        (whole[:, :3], whole[:, 3:], False),
        (whole[:, :3], whole[:, 2:], True),
        (whole[:, 0], whole[1, 1:], False),
        (whole[:, 0], whole[1, :1], True),
        (whole[::2], whole[1::2], False),
        (whole.view(-1)[::5], whole.view(-1)[::4], True),
        (whole[:0], whole, False),
        (whole.view(torch.int32)[2:], whole[:2], False),
        (whole.view(torch.int16)[:2], whole[:2], True),
    ]


@pytest.mark.parametrize(("one", "other", "expected"), cases())
def test_two_views_have_an_element_in_common(one: Tensor, other: Tensor, expected: bool) -> None:
    assert (overlap(one, other), overlap(other, one)) == (expected, expected)
