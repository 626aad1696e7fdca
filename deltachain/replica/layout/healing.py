"""What a trial left in memory that nobody can see, and so cannot put back."""

from __future__ import annotations

import logging
from functools import partial

from deltachain.errors import EngineDamagedError
from deltachain.replica.layout.source import LoadedCheckpoint
from deltachain.replica.layout.state import ModelState
from deltachain.replica.layout.ways import RELOADS, bring

logger = logging.getLogger(__name__)


def heal(state: ModelState, source: LoadedCheckpoint) -> None:
    """Have the model compute again what it computed; its own loading may be what leads there.

    Args:
        state: Of the model, which holds it again.
        source: The checkpoint that it loaded.

    Raises:
        EngineDamagedError: It computes something else whatever is tried.
    """
    layers, tried = frozenset(state.modules), frozenset(state.outputs)
    state.put_back()
    for way in (*RELOADS, "loaded"):
        if not state.other_outputs(tried):
            return
        state.put_back(partial(bring, state.model, way, layers, source.clones(source.present)))
    left = state.other_outputs(tried)
    if left:
        message = (
            f"{min(left)} computes something else since it was tried to load it again; "
            "the engine keeps what it computes from where it cannot be put back"
        )
        logger.critical("%s: restart the engine", message)
        raise EngineDamagedError(message)
