"""Experts that an engine moves between the slots of one tensor, however alike they are."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from deltachain.replica.live_record import LiveRecord

SLOTS = 8


def experts(dtype: torch.dtype, changed: int) -> nn.Parameter:
    """Return experts made of one layer, in each of which some elements are changed."""
    torch.manual_seed(changed)
    stacked = torch.randn(1, 40, 50).to(dtype).repeat(SLOTS, 1, 1)
    for slot in stacked.view(SLOTS, -1):
        slot[torch.randint(2000, (changed,))] = torch.randn(changed).to(dtype)
    return nn.Parameter(stacked, requires_grad=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("changed", [1, 3, 20])
def test_two_slots_that_change_places_are_seen(dtype: torch.dtype, changed: int) -> None:
    live = experts(dtype, changed)
    model: Any = SimpleNamespace(tensors=lambda: {"experts.weight": live})
    record = LiveRecord(model, ())
    assert not record.difference(model)
    bits = live.data.view(torch.uint8)
    for one, other in combinations(range(SLOTS), 2):
        before = bits.clone()
        bits[one], bits[other] = before[other], before[one]
        assert "holds other bits" in record.difference(model)
        bits.copy_(before)


def test_slots_that_are_the_same_may_change_places() -> None:
    live = nn.Parameter(torch.ones(SLOTS, 40, 50))
    model: Any = SimpleNamespace(tensors=lambda: {"experts.weight": live})
    record = LiveRecord(model, ())
    live.data.copy_(live.data.flip(0))
    assert not record.difference(model)
