"""When a device has done what it was told, and what it does beside the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from deltachain.replica.engine import EngineModel


def settle() -> None:
    """Wait until the device has done what it was told, where there is one."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


@contextmanager
def settled() -> Iterator[None]:
    """Other streams of the engine have read old bits before, and read new ones after."""
    settle()
    try:
        yield
    finally:
        settle()


@contextmanager
def own_stream(model: EngineModel) -> Iterator[None]:
    """A stream beside the engine's own, so that staging does not queue up behind its kernels."""
    where = next((tensor.device for tensor in model.tensors().values()), torch.device("cpu"))
    if where.type != "cuda":
        yield
        return
    with torch.cuda.device(where), torch.cuda.stream(torch.cuda.Stream(where)):
        yield
        torch.cuda.current_stream(where).synchronize()
