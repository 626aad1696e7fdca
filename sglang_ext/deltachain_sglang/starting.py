"""Checks before a server loads anything."""

from __future__ import annotations

import os

from deltachain.control.server.refusal import refused
from deltachain.environment import is_strict
from deltachain.errors import EngineVersionError
from deltachain_sglang import compat


def check_start() -> None:
    """Exit if this server is configured to follow a chain, but its SGLang was not tested.

    Otherwise a difference would only cause a logged error, while the server serves what it loaded.

    Raises:
        SystemExit: This SGLang was not tested; the reason is logged.
    """
    try:
        compat.check_version()
    except EngineVersionError as exc:
        if is_strict(os.environ):
            raise refused(exc) from exc
