"""Every family can be made, and has nothing in it that looks right when it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deltachain.checkpoint import WEIGHTS_FILE
from tests.engines.families import FAMILIES, make


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_is_small_and_no_tensor_in_it_is_constant(name: str, tmp_path: Path) -> None:
    file = make(name, tmp_path) / WEIGHTS_FILE
    assert file.stat().st_size < 4_000_000
    tensors = load_file(file)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert [n for n, t in tensors.items() if t.numel() > 1 and t.min() == t.max()] == []


def test_a_family_has_the_same_bits_wherever_it_is_made(tmp_path: Path) -> None:
    one = make("jamba", tmp_path / "one") / WEIGHTS_FILE
    torch.manual_seed(1)
    other = make(FAMILIES["jamba"], tmp_path / "other") / WEIGHTS_FILE
    assert one.read_bytes() == other.read_bytes()
