"""Synchronisation with a device, and a stream of its own for staging."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from deltachain.replica.engine import EngineModel


def settle() -> None:
    """Wait until the device, if any, has finished all its work."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


@contextmanager
def settled() -> Iterator[None]:
    """Synchronise before and after: other streams read old bits before, and new bits after."""
    settle()
    try:
        yield
    finally:
        settle()


@contextmanager
def own_stream(model: EngineModel) -> Iterator[None]:
    """Use a separate stream, so that staging does not queue behind the engine's kernels."""
    where = next((tensor.device for tensor in model.tensors().values()), torch.device("cpu"))
    if where.type != "cuda":
        yield
        return
    with torch.cuda.device(where), torch.cuda.stream(torch.cuda.Stream(where)):
        yield
        torch.cuda.current_stream(where).synchronize()
