"""Kernels that read scales where they lay: these are there as long as the kernel is."""

from __future__ import annotations

import gc
import sys
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from deltachain_vllm.scales import CREATE, OPS, owned


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's kernels, of which one keeps an address."""
    made: Any = ModuleType(OPS)
    setattr(made, CREATE, lambda _, scales, *__: SimpleNamespace(at=scales.data_ptr()))
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, OPS, made)
    return made


def test_what_is_packed_in_a_reload_keeps_its_scales(ops: Any) -> None:
    create = getattr(ops, CREATE)
    scales = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    gone = weakref.ref(scales)
    with owned():
        handler = getattr(ops, CREATE)(torch.zeros(2, 4), scales, torch.bfloat16)
    scales.data = torch.zeros(4)  # where the engine has them from now on
    del scales
    gc.collect()
    assert gone() is None
    assert handler.scales.data_ptr() == handler.at
    assert handler.scales.tolist() == [1.0] * 4
    assert getattr(ops, CREATE) is create


def test_a_vllm_without_such_kernels_is_left_alone(ops: Any) -> None:
    delattr(ops, CREATE)
    with owned():
        assert not hasattr(ops, CREATE)
