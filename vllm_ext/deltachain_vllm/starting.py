"""What can be known of a server before it loads anything: whether it will have a leader at all."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import PurePath
from typing import Final

from deltachain.control.server.refusal import refused
from deltachain.environment import is_strict
from deltachain.errors import ConfigError
from deltachain_vllm.compat import check_version

ROUTES: Final = "deltachain_http"
"""Our endpoint plugin, as ``VLLM_PLUGINS`` names it."""

logger = logging.getLogger(__name__)


def check_start() -> None:
    """End a server that was told to follow a chain, and that would start without a leader.

    Raises:
        SystemExit: The log says why.
    """
    try:
        if is_server(sys.argv):
            check_version()
            check_plugins(os.environ.get("VLLM_PLUGINS", ""))
    except ConfigError as exc:
        if is_strict(os.environ):
            raise refused(exc) from exc
        logger.warning("deltachain follows nothing: %s", exc)


def is_server(command: Sequence[str]) -> bool:
    """Whether a command line starts a server that takes requests."""
    if "--headless" in command:
        return False  # another node's server does
    program = PurePath(command[0]).name if command else ""
    serves = program in ("vllm", "main.py") and [*command[1:2]] == ["serve"]
    return serves or program == "api_server.py"


def check_plugins(named: str) -> None:
    """Refuse a server whose vLLM does not load our routes: the leader comes with them.

    Args:
        named: ``VLLM_PLUGINS``; endpoint plugins are loaded only where it names them.

    Raises:
        ConfigError: It does not.
    """
    if ROUTES not in named.split(","):
        raise ConfigError(
            f"vLLM loads no routes of deltachain: VLLM_PLUGINS is {named!r}",
            hint=f"VLLM_PLUGINS=deltachain,{ROUTES}; or DELTACHAIN_STRICT=0, where "
            "`python -m deltachain_vllm` leads this server",
        )
    if find_spec("vllm.plugins.endpoint_plugins") is None:
        raise ConfigError("this vLLM has no endpoint plugins", hint="take a tested version of it")
