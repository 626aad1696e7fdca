"""deltachain in stock vLLM: its plugins and the classes that its flags name.

This module imports only the standard library, because vLLM loads it in every process it starts;
code that needs vLLM, torch or the rest of deltachain is imported on first use.
"""

import logging
import os
from importlib import import_module
from multiprocessing import parent_process
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .engine import follow, subscribe
    from .extension import WorkerExtension
    from .routes import EndpointPlugin
    from .trainer import DeltaChainTrainerInit

__all__ = [
    "DeltaChainTrainerInit",
    "EndpointPlugin",
    "WorkerExtension",
    "follow",
    "register",
    "subscribe",
]

BACKEND: Final = "deltachain"  # name of the weight-transfer backend

HANDLE: Final = "deltachain_handle"  # name of the worker method that handles requests

MEETING: Final = "deltachain_meeting"
"""Name of the method of an engine's core that returns host and port of its group's store."""

IN_PLACE: Final = "in_place"  # pause mode in which caches and running requests are kept

_HOMES: Final = {
    "DeltaChainTrainerInit": "deltachain_vllm.trainer",
    "EndpointPlugin": "deltachain_vllm.routes",
    "WorkerExtension": "deltachain_vllm.extension",
    "follow": "deltachain_vllm.engine",
    "subscribe": "deltachain_vllm.engine",
}

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the backend, and hook loading: the entry point of ``vllm.general_plugins``.

    vLLM calls it in the API server, the engine core and every worker, possibly more than once per
    process, and does not catch exceptions. So repeated calls are allowed, and a vLLM without such
    backends causes a log message, not a crash.
    """
    speak()
    if os.environ.get("DELTACHAIN_URL") and parent_process() is None:
        from .start_check import check_start

        check_start()
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

        if BACKEND not in Factory._registry:  # vLLM has no public way to ask
            Factory.register_engine(BACKEND, "deltachain_vllm.backend", "DeltaChainEngine")

        from .compat import let_meet, remember_loaded

        remember_loaded()
        let_meet(MEETING)
        if os.environ.get("DELTACHAIN_PAUSE", "").strip() == IN_PLACE:
            from .cache_salts import salt_requests

            salt_requests()
    except (ImportError, AttributeError, ValueError) as exc:
        logger.warning("deltachain is not registered with this vLLM: %s", exc)


def speak() -> None:
    """Show deltachain's log messages among vLLM's, which shows only its own."""
    from deltachain.log_lines import show

    theirs = logging.getLogger("vllm")
    if theirs.handlers:
        show(theirs, theirs.level)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
