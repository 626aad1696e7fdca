"""Version 0 as a reference to a base checkpoint that every follower has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deltachain.checkpoint import Checkpoint
from deltachain.errors import ConfigError
from deltachain.format.documents import BaseRef, Edge
from deltachain.types import StateDigest, TensorSpec


def base_edge(folder: Path, specs: Sequence[TensorSpec], state: StateDigest) -> Edge:
    """Build the edge that refers to a checkpoint; verify that the model has the same bits.

    Args:
        folder: Folder of the checkpoint.
        specs: Specs of the model's tensors.
        state: State digest of the model.

    Raises:
        ConfigError: The bits differ, or the checkpoint lacks a tensor.
    """
    hint = (
        "base must be the checkpoint that the model was loaded from, before training; "
        "without it the first version is uploaded as an anchor"
    )
    checkpoint = Checkpoint(folder)
    for spec in specs:
        found = checkpoint.specs.get(spec.name)
        if found != spec:
            raise ConfigError(f"{folder} has {found}, the model has {spec}", hint=hint)
    if checkpoint.state(spec.name for spec in specs) != state:
        raise ConfigError(f"the model does not hold the bits of {folder}", hint=hint)
    reference = BaseRef(path=str(folder.resolve()), files=tuple(checkpoint.files()))
    return Edge(kind="base", reference=reference)
