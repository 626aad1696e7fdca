"""What a vLLM server refuses at its start, before it loads anything; imports no vLLM itself."""

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final

from deltachain.environment import is_strict, refused
from deltachain.errors import ConfigError, UnsupportedEngineError
from deltachain.replica.capabilities import SERVER
from deltachain.replica.engine import start_faults

from . import IN_PLACE
from .table import TABLE

logger = logging.getLogger(__name__)

PAUSES: Final = ("keep", "wait", "abort", IN_PLACE)
"""Pause modes: running requests are computed anew, waited for, aborted, or continue as they are."""

ROUTES: Final = "deltachain_http"  # name of deltachain's endpoint plugin in ``VLLM_PLUGINS``


def check(installed: str, environment: Mapping[str, str]) -> Iterator[ConfigError]:
    """Yield what a server would refuse that follows the chain of ``DELTACHAIN_URL``."""
    yield from start_faults(TABLE, PAUSES, installed, environment)
    if environment.get("DELTACHAIN_URL"):
        try:
            check_listed(environment.get("VLLM_PLUGINS", ""))
        except ConfigError as exc:
            yield exc


def check_listed(named: str) -> None:
    """Refuse a list of plugins without our routes: vLLM's endpoint plugins must be listed."""
    if ROUTES not in named.split(","):
        raise UnsupportedEngineError(
            f"vLLM loads no routes of deltachain: VLLM_PLUGINS is {named!r}",
            hint=f"VLLM_PLUGINS=deltachain,{ROUTES}",
        )


def check_start() -> None:
    """Exit if this server is to follow a chain, but would have no leader; log the reason."""
    from .compat import check_configured, check_version

    try:
        if is_server(sys.argv):
            TABLE.tell(check_version(SERVER, os.environ.get("DELTACHAIN_PAUSE", "").strip()))
            check_listed(os.environ.get("VLLM_PLUGINS", ""))
            check_front(sys.argv, os.environ)
            check_configured(_check_config)
        elif "--headless" not in sys.argv:
            logger.warning(
                "DELTACHAIN_URL is set, but this is no server of vLLM's: unless it starts one, "
                "call deltachain_vllm.follow(engine, url) or subscribe; nothing follows by itself"
            )
    except ConfigError as exc:
        if is_strict(os.environ):
            raise refused(exc) from exc
        logger.warning("deltachain follows nothing: %s", exc)


def _check_config(config: Any) -> None:
    from .compat import check_layout

    try:
        check_layout(config)
    except ConfigError as exc:
        if is_strict(os.environ):
            raise refused(exc) from None


def is_server(command: Sequence[str]) -> bool:
    if "--headless" in command:
        return False  # the server runs on another node
    program = PurePath(command[0]).name if command else ""
    serves = program in ("vllm", "main.py") and [*command[1:2]] == ["serve"]
    return serves or program == "api_server.py"


def check_front(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Refuse a server whose requests arrive where vLLM loads no plugins."""
    rust = environment.get("VLLM_USE_RUST_FRONTEND", "0").lower() not in ("", "0", "false")
    option = "VLLM_USE_RUST_FRONTEND" if rust else "--grpc" if "--grpc" in command else ""
    if option:
        raise UnsupportedEngineError(
            f"this server has a front end that loads no routes of deltachain: {option}",
            hint=f"start it without {option}",
        )
