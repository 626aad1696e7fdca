"""What keeps a server or an engine from following, found before it loads anything."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from deltachain.environment import is_strict, refused
from deltachain.errors import ConfigError, EngineVersionError, UnsupportedEngineError
from deltachain.replica.engine import start_faults

from .table import IN_PLACE, TABLE

logger = logging.getLogger(__name__)

PAUSES: Final = ("retract", IN_PLACE, "abort")
"""Pause modes: running requests are recomputed afterwards, continue as they are, or are aborted."""


def check(installed: str, environment: Mapping[str, str]) -> Iterator[ConfigError]:
    """Yield what keeps a server from following the chain of ``DELTACHAIN_URL``."""
    yield from start_faults(TABLE, PAUSES, installed, environment)
    named = [name.strip() for name in environment.get("SGLANG_PLUGINS", "").split(",")]
    if any(named) and "deltachain" not in named and environment.get("DELTACHAIN_URL"):
        yield UnsupportedEngineError(
            f"SGLang does not load deltachain: SGLANG_PLUGINS is {','.join(named)!r}",
            hint="add deltachain to it, or unset it",
        )


def check_start() -> None:
    """Exit if this server is configured to follow a chain, but its SGLang lacks names for that.

    Otherwise a difference would only cause a logged error, while the server serves what it loaded.
    """
    from . import compat

    try:
        TABLE.tell(compat.check_version(os.environ.get("DELTACHAIN_PAUSE", "").strip()))
    except EngineVersionError as exc:
        if is_strict(os.environ):
            raise refused(exc) from exc


def on_engine(original: Callable[..., Any], *args: Any) -> Any:
    """Wrap the end of an engine's construction: without a server there is no leader."""
    if os.environ.get("DELTACHAIN_URL"):
        exc = UnsupportedEngineError(
            "DELTACHAIN_URL is set, but an Engine in process follows nothing by itself",
            hint="unset it and call deltachain_sglang.subscribe(engine, url), or set "
            "DELTACHAIN_STRICT=0",
        )
        if is_strict(os.environ):
            from . import compat

            compat.end_children()
            raise exc
        logger.warning("deltachain follows nothing: %s", exc)
    return original(*args)
