"""Restore the outputs of layers, after trials that may have written to uninspectable memory."""

from __future__ import annotations

import logging
from functools import partial

from deltachain.errors import EngineDamagedError
from deltachain.replica.layout.load_methods import RELOADS, load_with
from deltachain.replica.layout.loaded_checkpoint import LoadedCheckpoint
from deltachain.replica.layout.model_state import ModelState

logger = logging.getLogger(__name__)


def restore_outputs(state: ModelState, source: LoadedCheckpoint) -> None:
    """Restore the model; if its outputs still differ, let it load its first weights again.

    Args:
        state: State of the model before the trials.
        source: The checkpoint that the engine loaded.

    Raises:
        EngineDamagedError: The outputs still differ after every attempt.
    """
    layers, tried = frozenset(state.modules), frozenset(state.outputs)
    state.put_back()
    for method in (*RELOADS, "loaded"):
        if not state.other_outputs(tried):
            return
        state.put_back(
            partial(load_with, state.model, method, layers, source.clones(source.present))
        )
    left = state.other_outputs(tried)
    if left:
        message = (
            f"{min(left)} computes something else after test loads; "
            "the engine keeps weights in memory that cannot be restored"
        )
        logger.critical("%s: restart the engine", message)
        raise EngineDamagedError(message)
