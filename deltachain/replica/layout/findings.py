"""Findings of discovery about each checkpoint tensor, and the layers that must follow it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from deltachain.replica.layout.classes import ON_HOST, TensorClass
from deltachain.replica.layout.loaded_checkpoint import LoadedCheckpoint
from deltachain.replica.layout.members import restoring
from deltachain.replica.layout.model_state import RELOADS, LoadGroup, LoadMethod, ModelState
from deltachain.replica.layout.recorder import Recording
from deltachain.replica.windows import Placement


def components(
    names: Iterable[str],
    links: Mapping[str, frozenset[str]],
    together: Iterable[frozenset[str]],
) -> list[list[str]]:
    """Split names into groups without common layers or sets; keep the order."""
    root: dict[str, str] = {}
    first: dict[str, str] = {}

    def find(name: str) -> str:
        while root[name] != name:
            root[name] = name = root[root[name]]
        return name

    labels: dict[str, list[str]] = defaultdict(list)
    for number, one in enumerate(together):
        for name in one:
            labels[name].append(f"together {number}")
    wanted = list(names)
    for name in wanted:
        root[name] = name
        for label in (*links[name], *labels[name]):
            root[find(name)] = find(first.setdefault(label, name))
    groups: dict[str, list[str]] = defaultdict(list)
    for name in wanted:
        groups[find(name)].append(name)
    return list(groups.values())


def distinct(places: Iterable[Placement]) -> list[Placement]:
    found: dict[object, Placement] = {}
    for place in places:
        found.setdefault((place.live.data_ptr(), place.offset, place.dims), place)
    return list(found.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Findings so far. Names are those of the chain, in its order, unless stated otherwise.

    Attributes:
        placements: Recorded places of each tensor, without duplicates.
        loaded_into: Layers that each tensor is loaded into, and layers with live tensors that are
            derived from it.
        joined: Sets of tensors that have to be loaded together.
        reasons: First reason of each tensor that cannot be written in place.
        reload_only: Tensors among these that only a reload of their layers can update.
        required: Classes that other ranks assigned to tensors.
        readable: Tensors whose bits can be read back where they are stored.
        overlapping: Tensors that share live elements with another tensor.
        unverifiable: Tensors whose elements are all equal, in layers that may rearrange them.
        untestable: Layers that may compute from memory that cannot be inspected.
        derived: Live tensors and numbers that are derived from each tensor.
        touched: Live tensors that the engine's own loader was seen to change.
        idle: Tensors that are loaded with others, and changed nothing by themselves.
        classes: Classes of the tensors decided so far.
        groups: Tensors that the engine loads, with the method.
    """

    placements: Mapping[str, tuple[Placement, ...]]
    loaded_into: Mapping[str, frozenset[str]]
    joined: tuple[frozenset[str], ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    reload_only: frozenset[str] = frozenset()
    required: Mapping[str, TensorClass] = field(default_factory=dict)
    readable: frozenset[str] = frozenset()
    overlapping: frozenset[str] = frozenset()
    unverifiable: frozenset[str] = frozenset()
    untestable: frozenset[str] = frozenset()
    derived: Mapping[str, frozenset[str]] = field(default_factory=dict)
    touched: frozenset[str] = frozenset()
    idle: frozenset[str] = frozenset()
    classes: Mapping[str, TensorClass] = field(default_factory=dict)
    groups: tuple[tuple[LoadMethod, LoadGroup], ...] = ()

    def in_place(self) -> list[str]:
        return [n for n, found in self.placements.items() if found and n not in self.reasons]

    def not_in_place(self, reasons: Mapping[str, str]) -> Findings:
        """Record why tensors cannot be written in place; the first reason of a tensor stays."""
        new = {name: reason for name, reason in reasons.items() if name not in self.reasons}
        return replace(self, reasons={**self.reasons, **new})

    def only_reloaded(self, reasons: Mapping[str, str]) -> Findings:
        return replace(self.not_in_place(reasons), reload_only=self.reload_only.union(reasons))


def from_recording(state: ModelState, source: LoadedCheckpoint, recording: Recording) -> Findings:
    owner = source.owner
    placements: dict[str, list[Placement]] = {name: [] for name in source.specs}
    for here, found in recording.places.items():
        placements[owner[here]] += found
    reasons: dict[str, str] = {}
    for here, reason in recording.reasons.items():
        reasons.setdefault(owner[here], reason)
    return Findings(
        placements={name: tuple(distinct(found)) for name, found in placements.items()},
        loaded_into=_loaded_into(state, source),
        joined=tuple(frozenset(owner[here] for here in one) for one in recording.together),
        reasons=reasons,
        reload_only=frozenset(owner[here] for here in recording.raised),
    )


def _loaded_into(state: ModelState, source: LoadedCheckpoint) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = defaultdict(frozenset)
    with restoring(state.modules.values()) as members:
        layers = state.model.layers(source.meta())
        members.put_back()
    for here, into in layers.items():
        found[source.owner[here]] |= into
    return dict(found)


def require_classes(findings: Findings, classes: Mapping[str, TensorClass]) -> Findings:
    """Limit tensors to the classes that they have on other ranks, or worse ones."""
    worse = {n: f"it is {kind} on another rank" for n, kind in classes.items() if kind in ON_HOST}
    reloads = findings.reload_only.union(n for n, kind in classes.items() if kind in RELOADS)
    return replace(findings.not_in_place(worse), reload_only=reloads, required=dict(classes))


Links = Mapping[str, frozenset[str]]
"""Layers that each tensor is loaded into or shares memory with."""


def links_of(
    state: ModelState, source: LoadedCheckpoint, findings: Findings, names: Iterable[str]
) -> Links:
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
    return frozenset().union(*(links[name] for name in names))


def group_of(state: ModelState, links: Links, names: Sequence[str]) -> LoadGroup:
    """Return a group of tensors; without layers if the layers of a tensor are unknown."""
    is_known = all(links[name] for name in names)
    layers = state.memory.tied(all_layers(links, names)) if is_known else frozenset()
    return LoadGroup(tuple(names), layers)
