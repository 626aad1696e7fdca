"""Tensors that the engine itself must load: grouped, tried in each of its ways, and decided."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from deltachain.replica.layout.components import components
from deltachain.replica.layout.findings import Findings
from deltachain.replica.layout.links import Links, all_layers, group_of, links_of
from deltachain.replica.layout.rest import Rest, lies
from deltachain.replica.layout.source import LoadedCheckpoint
from deltachain.replica.layout.state import ModelState
from deltachain.replica.layout.trial import Outcome, Trial
from deltachain.replica.layout.update_path import ORDER, TensorClass
from deltachain.replica.layout.ways import RELOADS, Group, Way


def try_loading(state: ModelState, source: LoadedCheckpoint, findings: Findings) -> Findings:
    """Let the engine's loader load what it computes or casts; what fails must be reloaded."""
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
    """Reload whole layers of what is left; refuse what that does not update exactly."""
    links = links_of(state, source, findings, source.specs)
    groups = _groups_to_reload(state, findings, links)
    findings = _without_classes(findings, groups)
    why = {group.names[0]: _obstacle(findings, group) for group in groups}
    testable = [group for group in groups if not why[group.names[0]]]
    for way in RELOADS:
        left = [
            group
            for group in testable
            if group.names[0] not in findings.classes and _is_allowed(findings, way, group)
        ]
        findings, refused = _try(state, source, findings, way, left)
        for name, reason in refused.items():
            why[name] = reason or why[name] or "the engine gives no way to load it again"
    return _decided(findings, groups, why)


def _groups_to_reload(state: ModelState, findings: Findings, links: Links) -> list[Group]:
    """Groups that have every tensor of each of their layers, some of which must be reloaded."""
    touched = all_layers(links, findings.reload_only)
    names = [n for n in links if n in findings.reload_only or links[n] & touched]
    grown = _with_neighbours(names, links, findings.joined)
    groups = [group_of(state, links, one) for one in components(grown, links, findings.joined)]
    return [group for group in groups if not findings.reload_only.isdisjoint(group.names)]


def _with_neighbours(names: list[str], links: Links, joined: Iterable[frozenset[str]]) -> list[str]:
    """Tensors, and all that are loaded with them or into their layers, until no more are."""
    while True:
        known = frozenset(names).union(*(one for one in joined if not one.isdisjoint(names)))
        layers = all_layers(links, known)
        more = [name for name in links if name in known or links[name] & layers]
        if len(more) == len(names):
            return more
        names = more


def _without_classes(findings: Findings, groups: Sequence[Group]) -> Findings:
    """Forget the classes of tensors in some groups: a layer is reloaded whole."""
    names = frozenset(name for group in groups for name in group.names)
    return replace(
        findings,
        classes={name: kind for name, kind in findings.classes.items() if name not in names},
        groups=tuple(one for one in findings.groups if names.isdisjoint(one[1].names)),
    )


def _obstacle(findings: Findings, group: Group) -> str:
    """Why no reload of a group can be proven; empty where one may be."""
    if not findings.overlapping.isdisjoint(group.names):
        return "the one that is loaded last would win"
    if not findings.unverifiable.isdisjoint(group.names):
        return "nor would loading them again"
    if group.layers & findings.untestable:
        return "nor can it be tried"
    return "" if group.layers else "no layer of it is known"


def _is_allowed(findings: Findings, way: Way, group: Group) -> bool:
    """Whether a way is no better than what other ranks need."""
    return all(ORDER[findings.required.get(name, way)] <= ORDER[way] for name in group.names)


def _decided(findings: Findings, groups: Sequence[Group], why: Mapping[str, str]) -> Findings:
    """Refuse what could not be reloaded, and give all of it a reason."""
    reasons, classes = dict(findings.reasons), dict(findings.classes)
    for group in groups:
        for name in group.names:
            reason = reasons.setdefault(name, "its layer is packed")
            if name not in classes:
                classes[name] = "refused"
                reasons[name] = f"{reason}; {why[group.names[0]] or 'no way is proven'}"
    return replace(findings, reasons=reasons, classes=classes)


def _try(
    state: ModelState, source: LoadedCheckpoint, findings: Findings, way: Way, groups: list[Group]
) -> tuple[Findings, Mapping[str, str]]:
    """Try a way; what it proves is decided. Why it fails for some groups, by their first tensor.

    Groups that cannot be loaded each by itself may be loaded together.
    """
    findings, refused = _try_each(state, source, findings, way, groups)
    left = [group for group in groups if group.names[0] in refused]
    if len(left) < 2 or not any(refused.values()):
        return findings, refused
    names = frozenset(name for group in left for name in group.names)
    links = links_of(state, source, findings, [name for name in source.specs if name in names])
    whole = group_of(state, links, list(links))
    findings, again = _try_each(state, source, findings, way, [whole])
    if not again:
        findings = replace(findings, joined=(*findings.joined, names))
    return findings, again and refused


def _try_each(
    state: ModelState,
    source: LoadedCheckpoint,
    findings: Findings,
    way: Way,
    groups: Sequence[Group],
) -> tuple[Findings, Mapping[str, str]]:
    """The same, each group by itself."""
    outcome = _trial(state, source, findings, way, groups).run(groups)
    refused = dict(outcome.refused)
    proven: list[Group] = []
    for group in groups:
        first = group.names[0]
        if first in refused:
            continue
        why = _doubt(source, findings, outcome, group)
        silent = _silent(findings, outcome, group)
        if not why and silent and way == "reloaded":
            so_far = _proven(findings, way, proven, outcome)
            why = _unconfirmed(state, source, so_far, group, silent)
        if why:
            refused[first] = why
        else:
            proven.append(group)
    return _proven(findings, way, proven, outcome), refused


def _doubt(source: LoadedCheckpoint, findings: Findings, outcome: Outcome, group: Group) -> str:
    """Why a trial that did not fail proves nothing of a group; empty where it does."""
    silent = _silent(findings, outcome, group)
    blank = [
        name for name in outcome.idle & silent & source.uniform if source.specs[name].numel > 1
    ]
    if blank:
        return f"nothing follows {min(blank)}, which is all alike"
    stray = _stray(source, findings, outcome, group)
    return f"other bits of {min(stray)} do not arrive at its place" if stray else ""


def _silent(findings: Findings, outcome: Outcome, group: Group) -> frozenset[str]:
    """Tensors of a group that no output follows."""
    return (outcome.idle | outcome.beside).intersection(group.names) - findings.overlapping


def _stray(
    source: LoadedCheckpoint, findings: Findings, outcome: Outcome, group: Group
) -> frozenset[str]:
    """Tensors whose other bits do not arrive where their first ones are, which is no chance."""
    return outcome.moved.intersection(group.names) - source.uniform - findings.overlapping


def _unconfirmed(
    state: ModelState,
    source: LoadedCheckpoint,
    findings: Findings,
    group: Group,
    silent: frozenset[str],
) -> str:
    """Why a reload may have left out what nothing followed: from nothing, something does."""
    again = _trial(state, source, findings, "repacked", [group]).run([group])
    if again.refused or _silent(findings, again, group) != silent:
        return f"nothing follows {min(silent)}"
    return ""


def _proven(findings: Findings, way: Way, groups: Sequence[Group], outcome: Outcome) -> Findings:
    """Decide groups that a trial has proven a way for."""
    names = [name for group in groups for name in group.names]
    classes: dict[str, TensorClass] = dict.fromkeys(names, way)
    return replace(
        findings,
        readable=findings.readable - outcome.moved.intersection(names),
        touched=findings.touched | (outcome.touched if way == "loaded" else frozenset()),
        classes={**findings.classes, **classes},
        groups=(*findings.groups, *((way, group) for group in groups)),
    )


def _trial(
    state: ModelState,
    source: LoadedCheckpoint,
    findings: Findings,
    way: Way,
    groups: Sequence[Group],
) -> Trial:
    names = [name for group in groups for name in group.names]
    links = links_of(state, source, findings, names)
    return Trial(
        state=state,
        way=way,
        weights=source.clones,
        links=links,
        made=findings.derived,
        vectors={name for name in links if len(source.specs[name].shape) < 2},
        visible={name for name, found in findings.placements.items() if found},
        shared=findings.overlapping,
        moved=partial(_moved, source, findings),
        rest=_rest(state, source, findings, links),
    )


def _moved(
    source: LoadedCheckpoint, findings: Findings, names: Iterable[str], others: Container[str]
) -> frozenset[str]:
    """Of some tensors, of which others hold other bits, those that are not in their places."""
    return frozenset(
        name
        for name in findings.readable.intersection(names)
        if not lies(
            findings.placements[name],
            source.other(name) if name in others else source.bits(name),
        )
    )


def _rest(
    state: ModelState, source: LoadedCheckpoint, findings: Findings, loaded: Container[str]
) -> Rest:
    """What is known to have a way, beside some tensors."""
    return Rest(
        state.model,
        source,
        {name: findings.placements[name] for name in findings.in_place() if name not in loaded},
        [one for one in findings.groups if not any(name in loaded for name in one[1].names)],
    )


def decide_rest(findings: Findings) -> Findings:
    """Give everything that is left its class."""
    left: dict[str, TensorClass] = {
        name: "in_place" if found else "absent"
        for name, found in findings.placements.items()
        if name not in findings.classes
    }
    return replace(findings, classes={**findings.classes, **left})
