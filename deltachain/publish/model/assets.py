"""Small files of a checkpoint besides its weights: configuration and tokenizer."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import nn

from deltachain.checkpoint import read_assets
from deltachain.publish.config import PublishConfig
from deltachain.publish.model.source import TensorSource, origin
from deltachain.remote_code import without_remote_code
from deltachain.torch_names import unwrapped


@runtime_checkable
class SavesItself(Protocol):
    """A configuration or a tokenizer of transformers."""

    def save_pretrained(self, save_directory: str) -> object:
        """Write its files into a folder."""


def collect_assets(
    model: nn.Module | TensorSource, config: PublishConfig, *others: object
) -> dict[str, bytes]:
    """Return the files of the configured checkpoint, else those written by model and tokenizer.

    The checkpoint's own files are preferred: a model loaded with fp32 master weights would write a
    configuration with dtype fp32.

    Args:
        model: The model; an export has no files of its own.
        config: Settings; ``assets`` or ``base`` may name the checkpoint.
        others: Tokenizer or processor of the model.
    """
    trusted = config.trust_remote_code
    folder = config.assets or config.base
    if folder is None and isinstance(model, nn.Module):
        folder = origin(model)
    if folder is not None:
        return read_assets(folder, trusted=trusted)
    with tempfile.TemporaryDirectory(prefix="deltachain-assets-") as scratch:
        whole = unwrapped(model) if isinstance(model, nn.Module) else model
        for thing in (getattr(whole, "config", None), *others):
            if isinstance(thing, SavesItself):
                thing.save_pretrained(scratch)
        return read_assets(Path(scratch), trusted=trusted)


def checked(files: Mapping[str, bytes], config: PublishConfig) -> dict[str, bytes]:
    """Return a caller's files, with references to remote code removed unless trusted."""
    trusted = config.trust_remote_code
    return {
        name: kept
        for name, data in files.items()
        if (kept := without_remote_code(name, data, trusted=trusted, where=config.url)) is not None
    }
