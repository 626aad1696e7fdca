"""Small files of a checkpoint besides its weights: configuration and tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from torch import nn

from deltachain.checkpoint import read_assets
from deltachain.config_fields import fields
from deltachain.publish.config import PublishConfig
from deltachain.publish.model.described import refuse_other_config
from deltachain.publish.model.kept_files import (
    CONFIG_FILE,
    MAIN_FILES,
    SavesItself,
    own_parts,
    saved,
    with_architecture,
    with_touched,
)
from deltachain.publish.model.source import TensorSource
from deltachain.publish.model.wire_dtypes import origin
from deltachain.redact import redacted_url
from deltachain.remote_code import without_remote_code
from deltachain.torch_names import unwrapped

logger = logging.getLogger(__name__)


def collect_assets(
    model: nn.Module | TensorSource, config: PublishConfig, *others: object
) -> dict[str, bytes]:
    """Return the files that belong to a model: those of its checkpoint, as they would be now.

    Files of the configured folder are taken as they are. Of the folder that the model was loaded
    from, those count that model and tokenizer have not changed since, and of the others what they
    write now: a tokenizer with further tokens, a configuration with another vocabulary.

    Args:
        model: The model; an export has no files of its own.
        config: Settings; ``assets`` or ``base`` may name the checkpoint.
        others: Tokenizer or processor of the model.
    """
    trusted = config.trust_remote_code
    whole = unwrapped(model) if isinstance(model, nn.Module) else None
    if config.assets is not None:
        return read_assets(config.assets, trusted=trusted)
    if whole is None:
        return read_assets(config.base, trusted=trusted) if config.base else {}
    refuse_other_config(whole)
    folder = config.base or origin(whole)
    if folder is None:
        files = saved(*own_parts(whole), *others, trusted=trusted)
        if CONFIG_FILE in files:
            files[CONFIG_FILE] = with_architecture(files[CONFIG_FILE], whole)
        return files
    files = read_assets(folder, trusted=trusted)
    now = with_touched(files, folder, whole, *others, trusted=trusted)
    if not any(isinstance(one, SavesItself) for one in others):
        _tell_outgrown(files, now, folder)
    return now


def _tell_outgrown(then: Mapping[str, bytes], now: Mapping[str, bytes], folder: Path) -> None:
    """Warn if a model was given other rows since it was loaded, beside a tokenizer that was not."""
    old, new = (_rows(files) for files in (then, now))
    if old != new and not MAIN_FILES.isdisjoint(now):
        logger.warning(
            "vocab_size is %s, and was %s in %s, whose tokenizer is published: if tokens were "
            "added, give PublishConfig.assets, a folder with the files of model and tokenizer",
            new,
            old,
            folder,
        )


def _rows(files: Mapping[str, bytes]) -> object:
    config = fields(files.get(CONFIG_FILE, b""))
    if not isinstance(config, dict):
        return None
    inner = config.get("text_config")
    return config.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None)


def checked(files: Mapping[str, bytes], config: PublishConfig) -> dict[str, bytes]:
    """Return a caller's files, with references to remote code removed unless trusted."""
    trusted = config.trust_remote_code
    return {
        name: kept
        for name, data in files.items()
        if (
            kept := without_remote_code(name, data, trusted=trusted, where=redacted_url(config.url))
        )
        is not None
    }
