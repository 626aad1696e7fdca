"""Restore what layers compute, after trials that may have written memory nobody can inspect."""

from __future__ import annotations

import logging
from functools import partial

from deltachain.errors import EngineDamagedError
from deltachain.replica.layout.load_methods import RELOADS, load_with
from deltachain.replica.layout.loaded_checkpoint import LoadedCheckpoint
from deltachain.replica.layout.model_state import ModelState

logger = logging.getLogger(__name__)


def restore_outputs(state: ModelState, source: LoadedCheckpoint) -> None:
    """Put back what the model holds; where its outputs differ, let it load its first weights again.

    Args:
        state: Of the model before the trials.
        source: The checkpoint that it loaded.

    Raises:
        EngineDamagedError: It computes something else whatever is tried.
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
