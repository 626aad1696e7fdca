"""Findings of discovery about each checkpoint tensor, and the layers that must follow it."""

import json
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, TypeAlias

from torch import Tensor, nn

from deltachain.replica.layout.classes import join_sets
from deltachain.replica.placements import Placement

from .classes import ON_HOST, TensorClass
from .load_recorder import Recording
from .model_state import RELOADS, LoadGroup, LoadMethod, ModelState
from .module_members import SIMPLE, Members, containers_of, items, restoring
from .runtime_tables import KV

Links: TypeAlias = Mapping[str, frozenset[str]]
"""Layers that each tensor is loaded into or shares memory with."""


def components(
    names: Iterable[str], links: Links, together: Iterable[frozenset[str]] = ()
) -> list[list[str]]:
    wanted = dict.fromkeys(names)
    known = [[(name, "") for name in one if name in wanted] for one in together]
    sets = join_sets([*([(n, ""), *(("", layer) for layer in links[n])] for n in wanted), *known])
    number = {member: at for at, one in enumerate(sets) for member in one}
    groups: dict[int, list[str]] = defaultdict(list)
    for name in wanted:
        groups[number[name, ""]].append(name)
    return list(groups.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Findings so far. Names are those of the chain, in its order, unless stated otherwise.

    ``loaded_into`` includes layers with live tensors that are derived from a tensor. ``joined`` are
    sets of tensors that have to be loaded together. ``reasons`` say why tensors cannot be written
    in place, and ``reload_only`` are those of them that only a reload of their layers can update.
    ``readable`` tensors can be read back where they are stored; ``overlapping`` ones share live
    elements with another; ``unverifiable`` ones have equal elements alone, in layers that may
    rearrange them. ``untestable`` layers may compute from memory that cannot be inspected.
    ``derived`` are live tensors and numbers made from each tensor, ``touched`` live tensors that
    the engine's own loader was seen to change. ``idle`` tensors are loaded with others, and changed
    nothing by themselves.
    """

    placements: Mapping[str, tuple[Placement, ...]]
    loaded_into: Links
    joined: tuple[frozenset[str], ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    reload_only: frozenset[str] = frozenset()
    required: Mapping[str, TensorClass] = field(default_factory=dict)  # on other ranks
    readable: frozenset[str] = frozenset()
    overlapping: frozenset[str] = frozenset()
    unverifiable: frozenset[str] = frozenset()
    untestable: frozenset[str] = frozenset()
    derived: Links = field(default_factory=dict)
    touched: frozenset[str] = frozenset()
    idle: frozenset[str] = frozenset()
    classes: Mapping[str, TensorClass] = field(default_factory=dict)  # of those decided so far
    groups: tuple[tuple[LoadMethod, LoadGroup], ...] = ()

    def in_place(self) -> list[str]:
        return [n for n, found in self.placements.items() if found and n not in self.reasons]

    def not_in_place(self, reasons: Mapping[str, str]) -> "Findings":
        """Record why tensors cannot be written in place; the first reason of a tensor stays."""
        return replace(self, reasons={**self.reasons, **reasons, **self.reasons})

    def only_reloaded(self, reasons: Mapping[str, str]) -> "Findings":
        return replace(self.not_in_place(reasons), reload_only=self.reload_only.union(reasons))


def from_recording(state: ModelState, recording: Recording) -> Findings:
    source, owner = state.source, state.source.owner
    reasons: dict[str, str] = {}
    for here, reason in recording.reasons.items():
        reasons.setdefault(owner[here], reason)
    layers: dict[str, frozenset[str]] = defaultdict(frozenset)
    members = Members(state.modules.values())
    with restoring(members):
        loaded_into = state.model.layers(source.meta())
        members.put_back()
    for here, into in loaded_into.items():
        layers[owner[here]] |= into
    return Findings(
        placements=recording.placements(owner),
        loaded_into=dict(layers),
        joined=tuple(frozenset(owner[here] for here in one) for one in recording.together),
        reasons=reasons,
        reload_only=frozenset(owner[here] for here in recording.raised),
    )


def require_classes(findings: Findings, classes: Mapping[str, TensorClass]) -> Findings:
    """Limit tensors to the classes that they have on other ranks, or worse ones."""
    worse = {n: f"it is {kind} on another rank" for n, kind in classes.items() if kind in ON_HOST}
    reloads = findings.reload_only.union(n for n, kind in classes.items() if kind in RELOADS)
    return replace(findings.not_in_place(worse), reload_only=reloads, required=dict(classes))


def links_of(state: ModelState, findings: Findings, names: Iterable[str]) -> Links:
    links: dict[str, frozenset[str]] = {}
    for name in names:
        places = findings.placements[name]
        sharers = [state.memory.overlapping(place.live) for place in places]
        layers = findings.loaded_into.get(name, frozenset()).union(*sharers)
        links[name] = layers if places else _with_sharers(state, name, layers)
    return links


def _with_sharers(state: ModelState, name: str, layers: frozenset[str]) -> frozenset[str]:
    """Return layers, and those that share the only tensor of one of them.

    Vectors beside a packed tensor, such as a bias, are not counted.
    """
    found, shape = set(layers), state.source.specs[name].shape
    for layer in layers:
        held = state.held.get(layer, [])
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


ADDRESS: Final = 1 << 32  # integers from here on may be addresses, which differ from start to start


def some_of_each(
    state: ModelState, found: Findings, groups: Iterable[LoadGroup], most: int
) -> list[LoadGroup]:
    """Return groups of each kind of layers and tensors, chosen at random, in order."""
    groups, draw = list(groups), random.SystemRandom().sample
    alike = kinds_of(state, found, groups).values()
    chosen = {one for same in alike for one in draw(same, min(most, len(same)))}
    return [group for group in groups if group in chosen]


def kinds_of(
    state: ModelState, found: Findings, groups: Iterable[LoadGroup]
) -> Mapping[str, list[LoadGroup]]:
    """Return groups by the kinds of their layers and tensors.

    Tensors of one kind are also stored alike at this start, as far as a dry run shows, and only
    numbers in their names differ.
    """
    alike: dict[str, list[LoadGroup]] = defaultdict(list)
    for group in groups:
        kinds = sorted(json.dumps(options_of(state.modules[one])) for one in group.layers)
        named = [re.sub(r"\d+", "0", name) for name in group.names]
        specs = [state.source.specs[name] for name in group.names]
        why = [found.reasons.get(name) for name in group.names]
        alike[repr((kinds, named, [(one.dtype, one.shape) for one in specs], why))].append(group)
    return alike


def options_of(module: nn.Module, *, named: bool = False) -> list[object]:
    """Return the classes, forms of tensors and plain values of a module, without its submodules.

    Floats may be made from weights, and texts, without ``named``, may name the module.
    """
    found: list[object] = [_path(module)]
    for container in containers_of(module):
        if isinstance(container, set):
            continue
        for key, value in items(container).items():
            if KV in str(key) or isinstance(value, float) or (isinstance(value, str) and not named):
                continue
            if isinstance(value, Tensor):
                form = [str(value.dtype), value.shape, value.stride(), value.device.type]
                found.append([str(key), _path(value), form])
            elif isinstance(value, int) and abs(value) >= ADDRESS:
                continue
            else:
                plain = isinstance(value, (*SIMPLE, Enum))
                found.append([str(key), str(value) if plain else _path(value)])
    return found


def _path(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
