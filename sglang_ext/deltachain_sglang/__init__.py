"""deltachain in stock SGLang: a plugin for its server and its schedulers.

SGLang is the host and never a dependency. This module imports nothing but the standard library,
because SGLang loads it in every process it starts.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib.util import find_spec
from multiprocessing import parent_process
from typing import Final

__all__ = ["PREFIX", "SCHEME", "register"]

SCHEME: Final = "deltachain:"
"""What SGLang's own endpoint is asked with: ``deltachain:7``, or ``deltachain:`` for the head."""

SERVER: Final = "sglang.srt.entrypoints.http_server"

PREFIX: Final = "/deltachain"
"""Where our own routes are."""


def register() -> None:
    """Entry point of ``sglang.srt.plugins``: take questions in schedulers, and lead in the server.

    SGLang calls it in the main process and in every process that this spawns, and logs what it
    raises: a server would serve on without it.

    Raises:
        SystemExit: This is a server that was told to follow a chain, with an SGLang that was not
            tested.
    """
    if find_spec("sglang") is None:
        return
    speak()
    if os.environ.get("DELTACHAIN_URL") and parent_process() is None:
        from deltachain_sglang.starting import check_start  # noqa: PLC0415

        check_start()
    from deltachain_sglang.ranks import hook_schedulers  # noqa: PLC0415

    hook_schedulers()
    # A server may itself be spawned, by what launches many; it has imported its own by then.
    if parent_process() is None or SERVER in sys.modules:
        from deltachain_sglang.front import hook_server  # noqa: PLC0415

        hook_server()


def speak() -> None:
    """Let our log lines appear among SGLang's, which shows its own level to all."""
    logging.getLogger("deltachain").setLevel(logging.INFO)
