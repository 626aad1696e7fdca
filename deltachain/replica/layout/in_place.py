"""Prove that tensors can be written in place, and find those that cannot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from typing import Final

import torch

from deltachain.replica.layout.findings import Findings, Links, all_layers, components, links_of
from deltachain.replica.layout.loaded_checkpoint import LoadedCheckpoint, mixed
from deltachain.replica.layout.model_state import ModelState, load_with
from deltachain.replica.layout.reloads import holds_bits, write_bits
from deltachain.replica.windows import Placement
from deltachain.subscribe.targets.patch import varied
from deltachain.torch_names import WIRE_NAMES


def compare_bits(source: LoadedCheckpoint, findings: Findings) -> Findings:
    """Compare live bits with the checkpoint's: a processed parameter cannot be written."""
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
    stored: dict[int, list[tuple[str, Placement]]] = defaultdict(list)
    for name, placements in findings.placements.items():
        for place in placements:
            stored[place.live.untyped_storage().data_ptr()].append((name, place))
    names = [name for sharing in stored.values() for name in _overlapping(sharing)]
    reasons = dict.fromkeys(names, "it shares live elements with another tensor")
    return replace(findings.only_reloaded(reasons), overlapping=frozenset(names))


def _overlapping(sharing: list[tuple[str, Placement]]) -> list[str]:
    if len(sharing) == 1:
        return []
    live = sharing[0][1].live
    size = live.untyped_storage().nbytes() // live.element_size()
    taken = torch.zeros(size, dtype=torch.bool)
    found: list[str] = []
    for name, place in sharing:
        mine = taken.as_strided(place.live.shape, place.live.stride(), place.at)
        if bool(mine.any()):
            found.append(name)
        mine.fill_(True)
    return found


def find_transformed(source: LoadedCheckpoint, findings: Findings) -> Findings:
    """Find tensors that are loaded into some layer, but stored nowhere in their original form."""
    reasons = {
        name: f"{min(layers)} does not keep it in its loaded form"
        for name, layers in findings.loaded_into.items()
        if layers and source.specs[name].numel
        if not findings.placements[name] and name not in findings.reasons
    }
    return findings.only_reloaded(reasons)


UNIFORM: Final = "all elements are equal, so their placement cannot be verified"
STRAYED: Final = "other values loaded into it do not arrive where it was recorded"


def verify_uniform(state: ModelState, source: LoadedCheckpoint, findings: Findings) -> Findings:
    """Load other values of uniform tensors: they must arrive at the recorded places.

    Equal elements match wherever they are read back, even where another tensor overlaps them.
    """
    links = links_of(state, source, findings, source.present)
    uniform = [
        name
        for name in findings.in_place()
        if name in source.uniform and links[name].isdisjoint(state.processed)
    ]
    layers = all_layers(links, uniform)
    names = [name for name in links if links[name] & layers]
    with suppress(Exception):
        if uniform:
            load_with(state.model, "loaded", layers, mixed(source.clones, names, uniform))
    lost = [n for n in uniform if not holds_bits(findings.placements[n], source.other(n))]
    state.put_back()
    return findings.only_reloaded(dict.fromkeys(lost, STRAYED))


def verify_in_place(state: ModelState, source: LoadedCheckpoint, findings: Findings) -> Findings:
    """Write other bits of each tensor alone: its layers must compute from them."""
    computing = state.outputs.keys() & state.processed
    found = links_of(state, source, findings, findings.in_place())
    links = {name: layers & computing for name, layers in found.items() if layers & computing}
    reasons: dict[str, str] = {}
    for picked in zip_longest(*components(links, links, ())):
        names = [name for name in picked if name is not None]
        reasons |= _write_others(state, source, findings, names, links)
    return findings.only_reloaded(reasons)


def _write_others(
    state: ModelState,
    source: LoadedCheckpoint,
    findings: Findings,
    names: Sequence[str],
    links: Links,
) -> dict[str, str]:
    layers = all_layers(links, names)
    for name in names:
        write_bits(findings.placements[name], source.other(name))
    followed = state.follows(layers)
    for name in names:
        write_bits(findings.placements[name], source.bits(name))
    left = state.follows(layers)
    reasons: dict[str, str] = {}
    for name in names:
        packed, unstable = links[name] - followed, links[name] & left
        if packed:
            reasons[name] = f"{min(packed)} computes from a packed copy"
        elif unstable:
            reasons[name] = f"{min(unstable)} does not restore its output"
    return reasons


def refuse_unverifiable(
    state: ModelState, source: LoadedCheckpoint, findings: Findings
) -> Findings:
    """Refuse uniform tensors that the engine may have rearranged.

    They match in any arrangement, and loading them again restores them. The arrangement is known
    from other bits in the same live storage, or if the layer multiplies correctly by a pattern.
    """
    transformed = _uniform_matrices(state, source, findings)
    findings = _unverifiable(findings, transformed)
    return _unverifiable(findings, _uniform_storages(state, source, findings))


def _unverifiable(findings: Findings, names: Sequence[str]) -> Findings:
    found = findings.only_reloaded(dict.fromkeys(names, UNIFORM))
    return replace(found, unverifiable=findings.unverifiable.union(names))


def _uniform_matrices(state: ModelState, source: LoadedCheckpoint, findings: Findings) -> list[str]:
    """Return uniform matrices that cannot be read back, in layers without another matrix.

    Vectors are processed like the matrix beside them.
    """
    matrices = [name for name in source.present if len(source.specs[name].shape) > 1]
    found = links_of(state, source, findings, matrices)
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


def _uniform_storages(state: ModelState, source: LoadedCheckpoint, findings: Findings) -> list[str]:
    """Return the tensors in storages of processed layers that contain only uniform tensors."""
    stored: dict[int, list[tuple[str, Placement]]] = defaultdict(list)
    for name in findings.in_place():
        for place in findings.placements[name]:
            stored[place.live.untyped_storage().data_ptr()].append((name, place))
    reloaded = frozenset().union(
        *(
            findings.loaded_into.get(name, frozenset())
            for name in findings.reload_only - findings.unverifiable
        )
    )
    found: list[str] = []
    for sharing in stored.values():
        layers = state.memory.in_storage_of(sharing[0][1].live)
        if layers.isdisjoint(state.processed):
            continue
        if any(varied(place.cut(source.bits(name))) for name, place in sharing):
            continue
        if not layers.isdisjoint(reloaded) or all(map(state.model.is_plain, layers)):
            continue  # its other tensors, or its output, show whether loading again is exact
        found += [name for name, _ in sharing]
    return found
