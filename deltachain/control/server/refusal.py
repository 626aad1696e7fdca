"""Exit of a server that is configured to follow a chain but cannot.

Otherwise it would serve the weights it loaded, and only a line in its log would tell.
"""

from __future__ import annotations

import logging

from deltachain.errors import DeltaChainError, EngineDamagedError

logger = logging.getLogger(__name__)


def refused(exc: DeltaChainError) -> SystemExit:
    """Log why a server cannot follow its chain; return the exception that ends it."""
    told = f"deltachain cannot follow the chain, so this server exits: {exc}"
    if not isinstance(exc, EngineDamagedError):
        told += "\n  set DELTACHAIN_STRICT=0 to serve the loaded weights instead"
    logger.error("%s", told)
    return SystemExit(exc.exit_code)
