"""The vLLM side of deltachain: what vLLM's plugin entry points and flags resolve to.

This module imports nothing but the standard library, because vLLM loads it in every process it
starts; what needs vLLM, torch or the rest of deltachain is imported when it is asked for.
"""

from __future__ import annotations

import logging
import os
from importlib import import_module
from multiprocessing import parent_process
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from deltachain_vllm.endpoint import EndpointPlugin
    from deltachain_vllm.extension import WorkerExtension
    from deltachain_vllm.offline import subscribe

__all__ = ["EndpointPlugin", "WorkerExtension", "register", "subscribe"]

BACKEND: Final = "deltachain"
"""Name of the weight-transfer backend."""

HANDLE: Final = "deltachain_handle"
"""The worker method that requests are sent to."""

_HOMES: Final = {
    "EndpointPlugin": "deltachain_vllm.endpoint",
    "WorkerExtension": "deltachain_vllm.extension",
    "subscribe": "deltachain_vllm.offline",
}

logger = logging.getLogger(__name__)


def register() -> None:
    """Entry point of ``vllm.general_plugins``: make the backend known, and record what is loaded.

    vLLM calls it in the API server, the engine core and every worker, possibly more than once in
    one process, and does not catch what it raises. So it may be called again, and a vLLM without
    such backends is told of in the log, not by a crash.

    Raises:
        SystemExit: This is a server that was told to follow a chain, and that would have no leader.
    """
    speak()
    if os.environ.get("DELTACHAIN_URL") and parent_process() is None:
        from deltachain_vllm.starting import check_start  # noqa: PLC0415

        check_start()
    try:
        from vllm.distributed.weight_transfer.factory import (  # noqa: PLC0415
            WeightTransferEngineFactory as Factory,
        )

        if BACKEND not in Factory._registry:  # vLLM has no public way to ask
            Factory.register_engine(BACKEND, "deltachain_vllm.backend", "DeltaChainEngine")

        from deltachain_vllm.compat import remember_loaded  # noqa: PLC0415

        remember_loaded()
    except (ImportError, AttributeError, ValueError) as exc:
        logger.warning("deltachain is not registered with this vLLM: %s", exc)


def speak() -> None:
    """Let our log lines appear among vLLM's, which shows its own only."""
    ours = logging.getLogger("deltachain")
    theirs = logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
