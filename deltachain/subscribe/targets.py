"""What a subscriber can be given to write into."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from torch import Tensor, nn

from deltachain.subscribe.folder import FolderTarget
from deltachain.subscribe.target import Target
from deltachain.subscribe.tensors import TensorTarget

TargetLike: TypeAlias = "Target | nn.Module | Mapping[str, Tensor] | str | os.PathLike[str]"


def as_target(thing: TargetLike) -> Target:
    """The target that a module, a dict of tensors or a path stands for."""
    if isinstance(thing, nn.Module | Mapping):
        return TensorTarget(thing)
    return FolderTarget(Path(thing)) if isinstance(thing, str | os.PathLike) else thing
