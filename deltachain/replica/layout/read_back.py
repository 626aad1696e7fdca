"""Comparison of live bits with the recorded places; nothing of the engine is changed."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import torch

from deltachain.replica.layout.findings import Findings
from deltachain.replica.layout.loaded_checkpoint import LoadedCheckpoint
from deltachain.replica.layout.untouched import holds_bits
from deltachain.replica.windows import Placement
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
    """Return the tensors in one storage that share elements with an earlier one."""
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
