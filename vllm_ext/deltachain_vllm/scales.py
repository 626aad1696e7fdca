"""Lifetime of scales that kernels read from their address at packing time, but do not own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final

from torch import Tensor

OPS: Final = "vllm._custom_ops"
CREATE: Final = "create_onednn_scaled_mm"
"""Operation that packs an eight-bit weight for CPUs without AMX; oneDNN gets its scales' address.
"""


@contextmanager
def owned() -> Iterator[None]:
    """Keep the scales of weights packed while this is open: a reload drops them once copied."""
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
