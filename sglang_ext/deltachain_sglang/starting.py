"""What can be known of a server before it loads anything."""

from __future__ import annotations

import os

from deltachain.control.server.refusal import refused
from deltachain.environment import is_strict
from deltachain.errors import EngineVersionError
from deltachain_sglang import compat


def check_start() -> None:
    """End a server that was told to follow a chain, where this SGLang was not tested.

    Without this, what differs would be an error in its log while it serves what it loaded.

    Raises:
        SystemExit: The log says why.
    """
    try:
        compat.check_version()
    except EngineVersionError as exc:
        if is_strict(os.environ):
            raise refused(exc) from exc
