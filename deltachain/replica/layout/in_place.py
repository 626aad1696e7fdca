"""Prove that tensors can be written in place, and find those that cannot."""

from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from typing import Final

import torch

from deltachain.replica.placements import Placement
from deltachain.subscribe.targets.tensor_patch import varied
from deltachain.torch_names import WIRE_NAMES

from .findings import Findings, all_layers, components, links_of
from .model_state import ModelState
from .reloads import holds_bits, write_bits


def compare_bits(state: ModelState, findings: Findings) -> Findings:
    """Compare live bits with the checkpoint's: a processed parameter cannot be written."""
    source = state.source
    reasons: dict[str, str] = {}
    changed: set[str] = set()
    for name, spec in source.specs.items():
        for place in findings.placements[name]:
            dtype = WIRE_NAMES.get(place.live.dtype)
            if dtype != spec.dtype:
                reasons.setdefault(name, f"the engine serves it as {dtype}")
            elif not holds_bits([place], source.bits(name)):
                reasons.setdefault(name, "the engine changed its bits after loading")
                changed.add(name)
    placed = {name for name, found in findings.placements.items() if found}
    return replace(
        findings.not_in_place(reasons),
        reload_only=findings.reload_only | changed,
        readable=frozenset(placed - reasons.keys()),
    )


def find_overlapping(findings: Findings) -> Findings:
    """Find tensors that would overwrite one another; tied names are one tensor."""
    overlapping: set[str] = set()
    for sharing in _by_storage(findings, findings.placements):
        live = sharing[0][1].live
        taken = torch.zeros(
            live.untyped_storage().nbytes() // live.element_size(), dtype=torch.bool
        )
        for name, place in sharing if len(sharing) > 1 else ():
            mine = taken.as_strided(place.live.shape, place.live.stride(), place.at)
            if bool(mine.any()):
                overlapping.add(name)
            mine.fill_(True)
    names = [name for name in findings.placements if name in overlapping]
    reasons = dict.fromkeys(names, "it shares live elements with another tensor")
    return replace(findings.only_reloaded(reasons), overlapping=frozenset(names))


def find_transformed(state: ModelState, findings: Findings) -> Findings:
    """Find tensors that are loaded into some layer, but stored nowhere in their original form."""
    reasons = {
        name: f"{min(layers)} does not keep it in its loaded form"
        for name, layers in findings.loaded_into.items()
        if layers and state.source.specs[name].numel
        if not findings.placements[name] and name not in findings.reasons
    }
    return findings.only_reloaded(reasons)


UNIFORM: Final = "all elements are equal, so their placement cannot be verified"
STRAYED: Final = "other values loaded into it do not arrive where it was recorded"


def verify_uniform(state: ModelState, findings: Findings) -> Findings:
    """Load other values of uniform tensors: they must arrive at the recorded places.

    Equal elements match wherever they are read back, even where another tensor overlaps them.
    """
    source = state.source
    links = links_of(state, findings, source.present)
    uniform = [
        name
        for name in findings.in_place()
        if name in source.uniform and links[name].isdisjoint(state.processed)
    ]
    layers = all_layers(links, uniform)
    names = [name for name in links if links[name] & layers]
    with suppress(Exception):
        if uniform:
            state.load("loaded", names, uniform, layers)
    lost = [n for n in uniform if not holds_bits(findings.placements[n], source.other(n))]
    state.put_back()
    return findings.only_reloaded(dict.fromkeys(lost, STRAYED))


def verify_in_place(state: ModelState, findings: Findings) -> Findings:
    """Write other bits of each tensor alone: its layers must compute from them."""
    source, computing = state.source, state.outputs.keys() & state.processed
    found = links_of(state, findings, findings.in_place())
    links = {name: layers & computing for name, layers in found.items() if layers & computing}
    reasons: dict[str, str] = {}
    for picked in zip_longest(*components(links, links)):
        names = [name for name in picked if name is not None]
        layers = all_layers(links, names)
        for name in names:
            write_bits(findings.placements[name], source.other(name))
        followed = state.follows(layers)
        for name in names:
            write_bits(findings.placements[name], source.bits(name))
        left = state.follows(layers)
        for name in names:
            packed, unstable = links[name] - followed, links[name] & left
            if packed:
                reasons[name] = f"{min(packed)} computes from a packed copy"
            elif unstable:
                reasons[name] = f"{min(unstable)} does not restore its output"
    return findings.only_reloaded(reasons)


def refuse_unverifiable(state: ModelState, findings: Findings) -> Findings:
    """Refuse uniform tensors that the engine may have rearranged.

    They match in any arrangement, and loading them again restores them. The arrangement is known
    from other bits in the same live storage, or if the layer multiplies correctly by a pattern.
    """
    for find in (_uniform_matrices, _uniform_storages):
        names = find(state, findings)
        found = findings.only_reloaded(dict.fromkeys(names, UNIFORM))
        findings = replace(found, unverifiable=findings.unverifiable.union(names))
    return findings


def _uniform_matrices(state: ModelState, findings: Findings) -> list[str]:
    """Return uniform matrices that cannot be read back, in layers without another matrix.

    Vectors are processed like the matrix beside them.
    """
    source = state.source
    matrices = [name for name in source.present if len(source.specs[name].shape) > 1]
    found = links_of(state, findings, matrices)
    links = {name: layers & state.processed for name, layers in found.items()}
    shown = all_layers(links, [name for name in links if name not in source.uniform])
    kept = frozenset(findings.in_place())
    return [
        name
        for name in links
        if name in source.uniform
        and name not in kept
        and not links[name] <= shown
        and not all(map(state.model.is_plain, links[name]))
    ]


def _uniform_storages(state: ModelState, findings: Findings) -> list[str]:
    """Return the tensors in storages of processed layers that contain only uniform tensors."""
    reloads = findings.reload_only - findings.unverifiable
    reloaded = frozenset().union(*(findings.loaded_into.get(n, frozenset()) for n in reloads))
    found: list[str] = []
    for sharing in _by_storage(findings, findings.in_place()):
        layers = state.memory.in_storage_of(sharing[0][1].live)
        if layers.isdisjoint(state.processed):
            continue
        if any(varied(place.cut(state.source.bits(name))) for name, place in sharing):
            continue
        if not layers.isdisjoint(reloaded) or all(map(state.model.is_plain, layers)):
            continue  # its other tensors, or its output, show whether loading again is exact
        found += [name for name, _ in sharing]
    return found


def _by_storage(findings: Findings, names: Iterable[str]) -> Iterable[list[tuple[str, Placement]]]:
    stored: dict[int, list[tuple[str, Placement]]] = defaultdict(list)
    for name in names:
        for place in findings.placements[name]:
            stored[place.live.untyped_storage().data_ptr()].append((name, place))
    return stored.values()
