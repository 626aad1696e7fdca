"""How a server ends that was told to follow a chain, and cannot.

Served on, it would answer with what it loaded, and nothing but a line in its log would say so.
"""

from __future__ import annotations

import logging

from deltachain.errors import DeltaChainError, EngineDamagedError

logger = logging.getLogger(__name__)


def refused(exc: DeltaChainError) -> SystemExit:
    """Say why a server cannot follow its chain; what to raise to end it, without a traceback."""
    told = f"deltachain cannot follow the chain, so this server ends: {exc}"
    if not isinstance(exc, EngineDamagedError):
        told += "\n  DELTACHAIN_STRICT=0 lets it serve what it loaded instead"
    logger.error("%s", told)
    return SystemExit(exc.exit_code)
