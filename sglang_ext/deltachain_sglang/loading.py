"""How SGLang loads a model: everything of that which may differ between versions of it."""

# ruff: noqa: PLC0415 - SGLang is imported where it is used: it takes seconds
from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deltachain.checkpoint import named_folder
from deltachain.errors import ConfigError


def guard(model: nn.Module) -> None:
    """Refuse what SGLang itself refuses to update: weights that others share or derive from.

    Raises:
        ConfigError: It would.
    """
    from sglang.srt.model_executor.model_runner_components import weight_updater
    from sglang.srt.runtime_context import get_model

    mode = get_model().weight_cache_mode
    if mode != "off":
        raise ConfigError(
            "the weights are shared with other engines by SGLang's weight cache",
            hint="start it with --weight-cache-mode off",
        )
    error = weight_updater._unsupported_derived_weight_cache_error(model)
    if error:
        raise ConfigError(f"SGLang refuses to update these weights: {error}")


def in_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    """What SGLang's loaders are called in."""
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    context: AbstractContextManager[None] = set_default_torch_dtype(dtype)
    return context


def reload(model: nn.Module, tensors: Iterable[tuple[str, Tensor]], device: torch.device) -> None:
    """Unpack, load, and pack again, as SGLang does for a checkpoint on disk."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    DefaultModelLoader.restore_weights_before_loading(model, device)
    DefaultModelLoader.load_weights_and_postprocess(model, tensors, device)


def linears() -> tuple[type[nn.Module], ...]:
    """Classes of layers that multiply by a parameter called ``weight``."""
    from sglang.srt.layers.linear import LinearBase

    return (LinearBase,)


def checkpoint(config: Any = None) -> Path:  # noqa: ANN401
    """The folder that SGLang loaded, in the Hub's cache where it is named by repository.

    Args:
        config: A rank's own, which knows of what was loaded later; the server's by default.
    """
    from sglang.srt.runtime_context import get_model

    named, cache = config or get_model(), get_model().download_dir
    return named_folder(named.model_path, revision=named.revision, cache=cache)
