"""Decide which tensors the engine loads itself, and by which of its load methods."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from deltachain.errors import TensorMismatchError
from deltachain.replica.layout.findings import Findings, components
from deltachain.replica.layout.links import Links, all_layers, group_of, links_of
from deltachain.replica.layout.load_methods import (
    RELOADS,
    LoadGroup,
    LoadMethod,
    load_with,
    modules_in,
)
from deltachain.replica.layout.loaded_checkpoint import LoadedCheckpoint
from deltachain.replica.layout.members import Members, may_hide_tensors
from deltachain.replica.layout.model_state import ModelState
from deltachain.replica.layout.trial import Outcome, Trial, Untouched, holds_bits
from deltachain.replica.layout.update_path import ORDER, TensorClass


def find_untestable(state: ModelState, source: LoadedCheckpoint, findings: Findings) -> Findings:
    """Find layers whose output cannot be computed, and whose members cannot all be inspected.

    Only layers with post-load processing can be such layers: either they are already, or processing
    them once more shows it.

    Raises:
        TensorMismatchError: There is such a layer already. Nothing is loaded then, since restoring
            it could not be verified.
    """
    links = links_of(state, source, findings, source.present)
    doubtful = (all_layers(links, links) & state.processed) - state.outputs.keys()
    if not doubtful:
        return findings
    _refuse_opaque(state, links, doubtful)
    names = [name for name in links if links[name] & doubtful]
    scope = state.memory.tied(all_layers(links, names))
    untestable = _opaque_after_reload(state, source, names, scope, doubtful)
    reasons = {
        name: f"the weights that {min(links[name] & untestable)} computes with cannot be inspected"
        for name in names
        if links[name] & untestable
    }
    return replace(findings.only_reloaded(reasons), untestable=untestable)


def _refuse_opaque(state: ModelState, links: Links, doubtful: frozenset[str]) -> None:
    for layer in sorted(doubtful & state.opaque):
        name = min(name for name in links if layer in links[name])
        raise TensorMismatchError(
            f"{layer} keeps its weights where they can be neither inspected nor tested: "
            f"{name!r} cannot be written",
            tensor=name,
            hint="set linear and MoE backends that keep weights in tensors",
        )


def _opaque_after_reload(
    state: ModelState,
    source: LoadedCheckpoint,
    names: Sequence[str],
    scope: frozenset[str],
    doubtful: frozenset[str],
) -> frozenset[str]:
    """Return doubtful layers with uninspectable members after processing, or not processed."""
    found: set[str] = set()
    processed: set[str] = set()
    for method in RELOADS:
        members = {layer: Members(modules_in(state.model, {layer})) for layer in doubtful}
        with suppress(Exception):
            load_with(state.model, method, scope, source.clones(names))
            processed |= doubtful
            found |= {n for n, one in members.items() if any(map(may_hide_tensors, one.replaced()))}
        state.put_back()
    return frozenset(found | (doubtful - processed))


def try_loading(state: ModelState, source: LoadedCheckpoint, findings: Findings) -> Findings:
    """Load tensors that the engine computes or casts by its loader; failures must be reloaded."""
    names = [name for name in findings.reasons if name not in findings.reload_only]
    links = links_of(state, source, findings, names)
    by_layer = components(names, links, findings.joined)
    alone = components(names, {name: frozenset() for name in names}, findings.joined)
    for grouped in (by_layer, alone):
        left = [one for one in grouped if findings.classes.keys().isdisjoint(one)]
        groups = [group_of(state, links, one) for one in left]
        findings, _ = _try(state, source, findings, "loaded", groups)
    failed = (name for name in names if name not in findings.classes)
    return replace(findings, reload_only=findings.reload_only.union(failed))


def try_reloading(state: ModelState, source: LoadedCheckpoint, findings: Findings) -> Findings:
    """Reload the layers of the remaining tensors whole; refuse those not updated exactly."""
    links = links_of(state, source, findings, source.specs)
    groups = _groups_to_reload(state, findings, links)
    findings = _without_classes(findings, groups)
    why = {group.names[0]: _obstacle(findings, group) for group in groups}
    testable = [group for group in groups if not why[group.names[0]]]
    for method in RELOADS:
        left = [
            group
            for group in testable
            if group.names[0] not in findings.classes and _is_allowed(findings, method, group)
        ]
        findings, refused = _try(state, source, findings, method, left)
        for name, reason in refused.items():
            why[name] = reason or why[name] or "the engine cannot load it again"
    return _decided(findings, groups, why)


def _groups_to_reload(state: ModelState, findings: Findings, links: Links) -> list[LoadGroup]:
    """Return the groups to reload: those with all tensors of their layers, and some to reload."""
    touched = all_layers(links, findings.reload_only)
    names = [n for n in links if n in findings.reload_only or links[n] & touched]
    grown = _with_neighbours(names, links, findings.joined)
    groups = [group_of(state, links, one) for one in components(grown, links, findings.joined)]
    return [group for group in groups if not findings.reload_only.isdisjoint(group.names)]


def _with_neighbours(names: list[str], links: Links, joined: Iterable[frozenset[str]]) -> list[str]:
    """Return tensors, and repeatedly all tensors loaded with them or into their layers."""
    while True:
        known = frozenset(names).union(*(one for one in joined if not one.isdisjoint(names)))
        layers = all_layers(links, known)
        more = [name for name in links if name in known or links[name] & layers]
        if len(more) == len(names):
            return more
        names = more


def _without_classes(findings: Findings, groups: Sequence[LoadGroup]) -> Findings:
    """Remove the classes of tensors in some groups, since a layer is reloaded whole."""
    names = frozenset(name for group in groups for name in group.names)
    return replace(
        findings,
        classes={name: kind for name, kind in findings.classes.items() if name not in names},
        groups=tuple(one for one in findings.groups if names.isdisjoint(one[1].names)),
    )


def _obstacle(findings: Findings, group: LoadGroup) -> str:
    """Return why no reload of a group can be proven; empty if one may be."""
    if not findings.overlapping.isdisjoint(group.names):
        return "the tensor loaded last would overwrite the other"
    if not findings.unverifiable.isdisjoint(group.names):
        return "loading it again would not verify it either"
    if group.layers & findings.untestable:
        return "and its layer cannot be tested"
    return "" if group.layers else "the layers it is loaded into are unknown"


def _is_allowed(findings: Findings, method: LoadMethod, group: LoadGroup) -> bool:
    """Return whether a method is no better than the classes on other ranks."""
    return all(ORDER[findings.required.get(name, method)] <= ORDER[method] for name in group.names)


def _decided(findings: Findings, groups: Sequence[LoadGroup], why: Mapping[str, str]) -> Findings:
    """Refuse the tensors that could not be reloaded, each with a reason."""
    reasons, classes = dict(findings.reasons), dict(findings.classes)
    for group in groups:
        for name in group.names:
            reason = reasons.setdefault(name, "its layer is packed")
            if name not in classes:
                classes[name] = "refused"
                reasons[name] = f"{reason}; {why[group.names[0]] or 'no load method is proven'}"
    return replace(findings, reasons=reasons, classes=classes)


def _try(
    state: ModelState,
    source: LoadedCheckpoint,
    findings: Findings,
    method: LoadMethod,
    groups: list[LoadGroup],
) -> tuple[Findings, Mapping[str, str]]:
    """Try a method, and decide the tensors that it proves.

    Groups that cannot be loaded each by itself may be loaded together.

    Returns:
        The findings, and why the method fails for groups, by their first tensor.
    """
    findings, refused = _try_each(state, source, findings, method, groups)
    left = [group for group in groups if group.names[0] in refused]
    if len(left) < 2 or not any(refused.values()):
        return findings, refused
    names = frozenset(name for group in left for name in group.names)
    links = links_of(state, source, findings, [name for name in source.specs if name in names])
    whole = group_of(state, links, list(links))
    findings, again = _try_each(state, source, findings, method, [whole])
    if not again:
        findings = replace(findings, joined=(*findings.joined, names))
    return findings, again and refused


def _try_each(
    state: ModelState,
    source: LoadedCheckpoint,
    findings: Findings,
    method: LoadMethod,
    groups: Sequence[LoadGroup],
) -> tuple[Findings, Mapping[str, str]]:
    """Do the same as ``_try``, but with each group by itself."""
    outcome = _trial(state, source, findings, method, groups).run(groups)
    refused = dict(outcome.refused)
    proven: list[LoadGroup] = []
    for group in groups:
        first = group.names[0]
        if first in refused:
            continue
        why = _doubt(source, outcome, group)
        silent = _silent(outcome, group)
        if not why and silent and method == "reloaded":
            so_far = _proven(findings, method, proven, outcome)
            why = _unconfirmed(state, source, so_far, group, silent)
        if why:
            refused[first] = why
        else:
            proven.append(group)
    return _proven(findings, method, proven, outcome), refused


def _doubt(source: LoadedCheckpoint, outcome: Outcome, group: LoadGroup) -> str:
    """Return why a trial without failure proves nothing about a group; empty if it does."""
    silent = _silent(outcome, group)
    blank = [
        name for name in outcome.idle & silent & source.uniform if source.specs[name].numel > 1
    ]
    if blank:
        return f"nothing changes with {min(blank)}, whose elements are all equal"
    stray = _stray(source, outcome, group)
    return (
        f"other values loaded into {min(stray)} do not arrive where it was recorded"
        if stray
        else ""
    )


def _silent(outcome: Outcome, group: LoadGroup) -> frozenset[str]:
    """Return the tensors of a group that changed no output."""
    return (outcome.idle | outcome.beside).intersection(group.names)


def _stray(source: LoadedCheckpoint, outcome: Outcome, group: LoadGroup) -> frozenset[str]:
    """Return the tensors whose other bits did not arrive where their first ones are stored."""
    return outcome.moved.intersection(group.names) - source.uniform


def _unconfirmed(
    state: ModelState,
    source: LoadedCheckpoint,
    findings: Findings,
    group: LoadGroup,
    silent: frozenset[str],
) -> str:
    """Return why a reload may have left out tensors: a repack shows that they change something."""
    again = _trial(state, source, findings, "repacked", [group]).run([group])
    if again.refused or _silent(again, group) != silent:
        return f"nothing changes with {min(silent)}"
    return ""


def _proven(
    findings: Findings, method: LoadMethod, groups: Sequence[LoadGroup], outcome: Outcome
) -> Findings:
    """Decide the groups that a trial has proven."""
    names = [name for group in groups for name in group.names]
    classes: dict[str, TensorClass] = dict.fromkeys(names, method)
    return replace(
        findings,
        readable=findings.readable - outcome.moved.intersection(names),
        touched=findings.touched | (outcome.touched if method == "loaded" else frozenset()),
        idle=findings.idle.difference(names) | outcome.idle.intersection(names),
        classes={**findings.classes, **classes},
        groups=(*findings.groups, *((method, group) for group in groups)),
    )


def _trial(
    state: ModelState,
    source: LoadedCheckpoint,
    findings: Findings,
    method: LoadMethod,
    groups: Sequence[LoadGroup],
) -> Trial:
    names = [name for group in groups for name in group.names]
    links = links_of(state, source, findings, names)
    return Trial(
        state=state,
        method=method,
        weights=source.clones,
        links=links,
        derived=findings.derived,
        vectors={name for name in links if len(source.specs[name].shape) < 2},
        placed={name for name, found in findings.placements.items() if found},
        displaced=partial(_displaced, source, findings),
        untouched=_untouched(state, source, findings, links),
    )


def _displaced(
    source: LoadedCheckpoint, findings: Findings, names: Iterable[str], others: Container[str]
) -> frozenset[str]:
    """Return the tensors not stored where they were recorded; ``others`` have other bits."""
    return frozenset(
        name
        for name in findings.readable.intersection(names)
        if not holds_bits(
            findings.placements[name],
            source.other(name) if name in others else source.bits(name),
        )
    )


def _untouched(
    state: ModelState, source: LoadedCheckpoint, findings: Findings, loaded: Container[str]
) -> Untouched:
    """Return the tensors with a known method, except those that are loaded."""
    return Untouched(
        state.model,
        source,
        {name: findings.placements[name] for name in findings.in_place() if name not in loaded},
        [one for one in findings.groups if not any(name in loaded for name in one[1].names)],
    )


def decide_remaining(findings: Findings) -> Findings:
    """Give all remaining tensors a class."""
    left: dict[str, TensorClass] = {
        name: "in_place" if found else "absent"
        for name, found in findings.placements.items()
        if name not in findings.classes
    }
    return replace(findings, classes={**findings.classes, **left})
