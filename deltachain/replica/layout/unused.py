"""Checkpoint tensors that an engine does not use: proven, not assumed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from deltachain.errors import TensorMismatchError
from deltachain.replica.layout.discover import Layout
from deltachain.replica.layout.healing import heal
from deltachain.replica.layout.members import SavedBits
from deltachain.replica.layout.other_bits import mixed
from deltachain.replica.layout.source import LoadedCheckpoint
from deltachain.replica.layout.state import ModelState
from deltachain.replica.layout.ways import RELOADS, Group, Way, bring

logger = logging.getLogger(__name__)


def find_unused(
    state: ModelState, source: LoadedCheckpoint, layout: Layout, names: Iterable[str]
) -> dict[str, str]:
    """Load the whole checkpoint with other bits in some tensors alone; nothing may follow.

    Args:
        state: Of the model, which holds it again afterwards.
        source: The checkpoint that it loaded.
        layout: The ways into its weights that were proven.
        names: Tensors that no rank holds.

    Returns:
        Why each is not known to be unused; empty for one that is.

    Raises:
        EngineDamagedError: The model computes something else, and nothing leads back.
    """
    wanted, groups = list(names), layout.groups
    if state.opaque:
        why = f"{min(state.opaque)} may use it: what that computes from cannot be seen"
        return dict.fromkeys(wanted, why)
    try:
        held = _held(state, source, layout, wanted)
        left = [name for name in wanted if name not in held]
        if not left or not _followed(state, source, groups, left):
            return dict.fromkeys(left, "") | held
        return {name: _followed(state, source, groups, [name]) for name in left} | held
    finally:
        heal(state, source)


def _held(
    state: ModelState, source: LoadedCheckpoint, layout: Layout, names: Iterable[str]
) -> dict[str, str]:
    """Tensors whose bits lie in a parameter that no way leads to: a loader may write it once."""
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
    groups: Sequence[tuple[Way, Group]],
    changed: Sequence[str],
) -> str:
    """What follows other bits in some tensors; empty for nothing, in full loads that were followed.

    All tensors have other bits in these loads: one that is used beside others only would show.
    """
    packed = frozenset().union(*(group.layers for way, group in groups if way == "repacked"))
    proven = [name for way, group in groups if way == "repacked" for name in group.names]
    others = [name for name in source.present if name not in changed]
    loads: list[tuple[Way, frozenset[str], list[str]]] = [
        ("loaded", frozenset(), others),
        ("reloaded", frozenset(), [name for name in others if name not in proven]),
        ("repacked", packed, proven),
    ]
    done = 0
    for way, layers, names in loads:
        if way == "repacked" and not layers:
            continue
        try:
            bring(state.model, way, layers, mixed(source.clones, [*names, *changed], names))
            if not state.changed():
                continue  # this way does nothing, and proves nothing
            before = ModelState(state.model, SavedBits(state.model.tensors()))
            every = [*names, *changed]
            bring(state.model, way, layers, mixed(source.clones, every, every))
            before.expect_same()
            done += way in RELOADS
        except TensorMismatchError as exc:
            return str(exc.args[0])
        except Exception as exc:  # noqa: BLE001 - an engine may raise anything
            logger.debug("a full load by way %r raised: %r", way, exc)
        finally:
            state.put_back()
    return "" if done else "no full load was possible"
