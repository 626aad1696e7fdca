"""Checks before a server loads anything."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from deltachain.environment import is_strict, refused
from deltachain.errors import EngineVersionError, UnsupportedEngineError

from . import compat

logger = logging.getLogger(__name__)


def check_start() -> None:
    """Exit if this server is configured to follow a chain, but its SGLang was not tested.

    Otherwise a difference would only cause a logged error, while the server serves what it loaded.
    """
    try:
        compat.check_version()
    except EngineVersionError as exc:
        if is_strict(os.environ):
            raise refused(exc) from exc


def hook_engine() -> None:
    compat.hook(compat.ENGINE, on_engine)


def on_engine(original: Callable[..., Any], *args: Any) -> Any:
    """Wrap the end of an engine's construction: without a server there is no leader."""
    if os.environ.get("DELTACHAIN_URL"):
        exc = UnsupportedEngineError(
            "DELTACHAIN_URL is set, but an Engine in process follows nothing by itself",
            hint="unset it and call deltachain_sglang.subscribe(engine, url), or set "
            "DELTACHAIN_STRICT=0",
        )
        if is_strict(os.environ):
            compat.end_children()
            raise exc
        logger.warning("deltachain follows nothing: %s", exc)
    return original(*args)
