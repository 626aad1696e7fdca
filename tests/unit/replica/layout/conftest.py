from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from deltachain.checkpoint import Checkpoint
from deltachain.replica.layout.loaded_checkpoint import LoadedCheckpoint
from tests.unit.replica.layout.loaders import SIZE, Loader, OneLayer

Make = Callable[..., tuple[OneLayer, LoadedCheckpoint]]


@pytest.fixture
def one_layer(tmp_path: Path) -> Make:
    """Makes an engine of one layer that has loaded a checkpoint of one tensor, or of more."""

    def make(
        loader: Loader, dtype: torch.dtype = torch.bfloat16, **more: Tensor
    ) -> tuple[OneLayer, LoadedCheckpoint]:
        full = {"w": torch.randn(SIZE).to(torch.bfloat16), **more}
        save_file(full, tmp_path / "model.safetensors")
        model = OneLayer(loader, dtype)
        model.checkpoint = tmp_path
        model.load((name, tensor.clone()) for name, tensor in full.items())
        checkpoint = Checkpoint(tmp_path)
        return model, LoadedCheckpoint(checkpoint, checkpoint.specs, {})

    return make
