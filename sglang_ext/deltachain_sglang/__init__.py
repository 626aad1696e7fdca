"""deltachain in stock SGLang: a plugin for its server and its schedulers.

SGLang is the host and never a dependency. This module imports only the standard library, because
SGLang loads it in every process it starts.
"""

import logging
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import parent_process
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .engine import follow, subscribe

__all__ = ["PREFIX", "SCHEME", "follow", "register", "subscribe"]

SCHEME: Final = "deltachain:"
"""Prefix of versions at SGLang's own endpoint: ``deltachain:7``, or ``deltachain:`` for the head.
"""

SERVER: Final = "sglang.srt.entrypoints.http_server"

PREFIX: Final = "/deltachain"  # path prefix of deltachain's own routes


def register() -> None:
    """Hook the schedulers and the server: the entry point of ``sglang.srt.plugins``.

    SGLang calls it in the main process and in every process that this spawns, and only logs
    exceptions: a server would serve on without the plugin.
    """
    if find_spec("sglang") is None:
        return
    speak()
    if os.environ.get("DELTACHAIN_URL") and parent_process() is None:
        from .start_check import check_start

        check_start()
    from .ranks import hook_schedulers

    hook_schedulers()
    # A launcher of many servers may spawn this one; it has imported its server module by then.
    if parent_process() is None or SERVER in sys.modules:
        from .routes import hook_server

        hook_server()


def speak() -> None:
    """Show deltachain's log messages among SGLang's, whose handlers are those of all."""
    from deltachain.log_lines import show

    show(logging.getLogger(), logging.INFO)


def __getattr__(name: str) -> Any:
    if name not in ("follow", "subscribe"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("deltachain_sglang.engine"), name)
