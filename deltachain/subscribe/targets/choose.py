"""Conversion of modules, tensors and paths to targets."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from deltachain.chain.chain import Chain
from deltachain.chain.checks import asset_paths
from deltachain.errors import ConfigError
from deltachain.subscribe.targets.base import Target
from deltachain.subscribe.targets.folder import FolderTarget

if TYPE_CHECKING:
    from torch import Tensor, nn

TargetLike: TypeAlias = "Target | nn.Module | Mapping[str, Tensor] | str | os.PathLike[str]"


def as_target(thing: TargetLike) -> Target:
    if isinstance(thing, str | os.PathLike):
        return FolderTarget(Path(thing).expanduser())
    torch = sys.modules.get("torch")  # if there is a module, torch is imported already
    if isinstance(thing, Mapping) or (torch is not None and isinstance(thing, torch.nn.Module)):
        from deltachain.subscribe.targets.tensors import TensorTarget  # noqa: PLC0415

        return TensorTarget(thing)
    if not hasattr(thing, "bind"):
        raise ConfigError(
            f"a {type(thing).__name__} is no target",
            hint="give a torch module, a dict of tensors by name, or the path of a folder",
        )
    return cast("Target", thing)


def bind(target: Target, chain: Chain) -> None:
    """Bind a target to a chain's tensors; warn if a module has another configuration."""
    if isinstance(target, FolderTarget):
        target.assets = asset_paths(chain.identity)
    target.bind({spec.name: spec for spec in chain.table.specs()}, chain.table.aliases)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(module := getattr(target, "source", None), torch.nn.Module):
        from deltachain.subscribe.targets.tensors import say_other_config  # noqa: PLC0415

        say_other_config(module, chain)
