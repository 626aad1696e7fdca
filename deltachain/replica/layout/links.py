"""Links from checkpoint tensors to layers that must follow them, and groups to load together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from deltachain.replica.layout.findings import Findings
from deltachain.replica.layout.load_methods import LoadGroup
from deltachain.replica.layout.loaded_checkpoint import LoadedCheckpoint
from deltachain.replica.layout.model_state import ModelState

Links = Mapping[str, frozenset[str]]
"""Layers that each tensor is loaded into or shares memory with."""


def links_of(
    state: ModelState, source: LoadedCheckpoint, findings: Findings, names: Iterable[str]
) -> Links:
    """Return the layers of some tensors, in the order of the given names."""
    return {name: _layers(state, source, findings, name) for name in names}


def _layers(
    state: ModelState, source: LoadedCheckpoint, findings: Findings, name: str
) -> frozenset[str]:
    found = findings.loaded_into.get(name, frozenset())
    placements = findings.placements[name]
    for place in placements:
        found |= state.memory.overlapping(place.live)
    return found if placements else _with_sharers(state, source.specs[name].shape, found)


def _with_sharers(
    state: ModelState, shape: tuple[int, ...], layers: frozenset[str]
) -> frozenset[str]:
    """Return layers, and those that share the only tensor of one of them.

    Vectors beside a packed tensor, such as a bias, are not counted.
    """
    found = set(layers)
    for layer in layers:
        held = [t for n, t in state.tensors.items() if state.owner[n] == layer]
        if len(held) == 1 and (len(shape) < 2 or held[0].numel() > max(shape)):
            found |= state.memory.overlapping(held[0])
    return frozenset(found)


def all_layers(links: Links, names: Iterable[str]) -> frozenset[str]:
    """Return the union of the layers of some tensors."""
    return frozenset().union(*(links[name] for name in names))


def group_of(state: ModelState, links: Links, names: Sequence[str]) -> LoadGroup:
    """Return a group of tensors; without layers if the layers of a tensor are unknown."""
    is_known = all(links[name] for name in names)
    layers = state.memory.tied(all_layers(links, names)) if is_known else frozenset()
    return LoadGroup(tuple(names), layers)
