"""Kernels that compute from memory nobody can see, and reloads that write into it and fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from deltachain.checkpoint import Checkpoint
from deltachain.errors import EngineDamagedError
from deltachain.replica.layout.discover import discover
from deltachain.replica.layout.loaded_checkpoint import LoadedCheckpoint
from tests.unit.replica.layout.loaders import PLANNED, SIZE, OneLayer


def failing(folder: Path, write: Callable[[Tensor, Tensor], object]) -> tuple[OneLayer, Tensor]:
    """An engine that can reload what it holds, and fails with other bits when it has written."""
    first = torch.randn(SIZE).to(torch.bfloat16)
    save_file({"w": first}, folder / "model.safetensors")
    model = OneLayer(PLANNED["copy"])
    model.checkpoint = folder
    model.load([("w", first.clone())])
    model.pack()
    assert model.kernel is not None
    memory = model.kernel()

    def reload(model: OneLayer, w: Tensor) -> None:
        is_first = torch.equal(w, first)
        model.p.data.copy_(w)
        write(memory, w)
        if not is_first:
            raise RuntimeError("a kernel is missing")

    model.reloader = reload
    return model, memory


def source_of(model: OneLayer) -> LoadedCheckpoint:
    checkpoint = Checkpoint(model.checkpoint)
    return LoadedCheckpoint(checkpoint, checkpoint.specs, {})


def test_a_refused_reload_is_undone_by_the_engine_itself(tmp_path: Path) -> None:
    model, memory = failing(tmp_path, lambda memory, w: memory.copy_(w))
    before = memory.clone()
    assert discover(model, source_of(model)).classes == {"w": "refused"}
    assert model.kernel is not None
    assert model.kernel() is memory
    assert torch.equal(memory, before)


def test_an_engine_that_cannot_undo_it_must_be_restarted(tmp_path: Path) -> None:
    def spoil(memory: Tensor, w: Tensor) -> None:
        if not torch.equal(w, memory):
            memory.fill_(7)

    model, _ = failing(tmp_path, spoil)
    with pytest.raises(EngineDamagedError, match="restart the engine"):
        discover(model, source_of(model))
