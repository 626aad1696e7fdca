"""Scales that kernels read where they lay when a weight was packed, and do not own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final

from torch import Tensor

OPS: Final = "vllm._custom_ops"
CREATE: Final = "create_onednn_scaled_mm"
"""Packs a weight of eight bits for CPUs without AMX. oneDNN is given the address of its scales."""


@contextmanager
def owned() -> Iterator[None]:
    """Have what is packed while this is open keep its scales: a reload drops them once copied."""
    ops: Any = import_module(OPS)
    create = getattr(ops, CREATE, None)
    if create is None:
        yield
        return

    def keep(weight: Tensor, scales: Tensor, *more: Any, **named: Any) -> Any:  # noqa: ANN401
        handler = create(weight, scales, *more, **named)
        handler.scales = scales.data
        return handler

    setattr(ops, CREATE, keep)
    try:
        yield
    finally:
        setattr(ops, CREATE, create)
