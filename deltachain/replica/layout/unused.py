"""Prove that an engine does not use some tensors of its checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from deltachain.errors import TensorMismatchError
from deltachain.replica.layout.discover import Layout
from deltachain.replica.layout.load_methods import RELOADS, LoadGroup, LoadMethod, load_with
from deltachain.replica.layout.loaded_checkpoint import LoadedCheckpoint, mixed
from deltachain.replica.layout.members import SavedBits
from deltachain.replica.layout.model_state import ModelState, restore_outputs

logger = logging.getLogger(__name__)


def find_unused(
    state: ModelState, source: LoadedCheckpoint, layout: Layout, names: Iterable[str]
) -> dict[str, str]:
    """Load the whole checkpoint with other bits in some tensors alone: nothing may change.

    Args:
        state: State of the model; restored afterwards.
        source: The checkpoint that the engine loaded.
        layout: Discovered layout of the rank.
        names: Names of tensors that no rank holds.

    Returns:
        Reason why each tensor is not proven to be unused; empty for an unused one.

    Raises:
        EngineDamagedError: Outputs of the model have changed, and cannot be restored.
    """
    wanted, groups = list(names), layout.groups
    if state.opaque:
        why = f"{min(state.opaque)} may use it, and its weights cannot be inspected"
        return dict.fromkeys(wanted, why)
    try:
        held = _held(state, source, layout, wanted)
        left = [name for name in wanted if name not in held]
        if not left or not _followed(state, source, groups, left):
            return dict.fromkeys(left, "") | held
        return {name: _followed(state, source, groups, [name]) for name in left} | held
    finally:
        restore_outputs(state, source)


def _held(
    state: ModelState, source: LoadedCheckpoint, layout: Layout, names: Iterable[str]
) -> dict[str, str]:
    """Return tensors in a parameter that no update reaches, which a loader may write only once."""
    places = [place for places in layout.places.values() for place in places]
    reached = {place.live.untyped_storage().data_ptr() for place in places}
    unreached = [
        (live, tensor)
        for live, tensor in state.tensors.items()
        if isinstance(tensor, nn.Parameter)
        and tensor.untyped_storage().data_ptr() not in reached
        and state.owner[live] not in layout.layers
    ]
    found: dict[str, str] = {}
    for name in names if unreached else ():
        for _, tensor in source.clones([name]):
            for live, parameter in unreached:
                if _holds(parameter, tensor):
                    found[name] = f"{live} holds its bits, and no load writes it again"
    return found


def _holds(parameter: Tensor, tensor: Tensor) -> bool:
    if parameter.numel() != tensor.numel():
        return False
    same = tensor.reshape(-1).to(parameter.device, parameter.dtype)
    return torch.equal(parameter.detach().reshape(-1), same)


def _followed(
    state: ModelState,
    source: LoadedCheckpoint,
    groups: Sequence[tuple[LoadMethod, LoadGroup]],
    changed: Sequence[str],
) -> str:
    """Return which changes some tensors cause; empty for none, if loads of the others changed some.

    All tensors have other bits in these loads, to reveal one that acts only together with others.
    """
    packed = frozenset().union(*(group.layers for method, group in groups if method == "repacked"))
    proven = [name for method, group in groups if method == "repacked" for name in group.names]
    others = [name for name in source.present if name not in changed]
    loads: list[tuple[LoadMethod, frozenset[str], list[str]]] = [
        ("loaded", frozenset(), others),
        ("reloaded", frozenset(), [name for name in others if name not in proven]),
        ("repacked", packed, proven),
    ]
    done = 0
    for method, layers, names in loads:
        if method == "repacked" and not layers:
            continue
        try:
            load_with(state.model, method, layers, mixed(source.clones, [*names, *changed], names))
            if not state.changed():
                continue  # this method changes nothing, which proves nothing
            before = ModelState(state.model, SavedBits(state.model.tensors()))
            every = [*names, *changed]
            load_with(state.model, method, layers, mixed(source.clones, every, every))
            before.expect_same()
            done += method in RELOADS
        except TensorMismatchError as exc:
            return str(exc.args[0])
        except Exception as exc:  # noqa: BLE001 - an engine may raise anything
            logger.debug("a full load by method %r raised: %r", method, exc)
        finally:
            state.put_back()
    return "" if done else "no full load was possible"
