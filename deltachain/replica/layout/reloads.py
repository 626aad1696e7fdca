"""Test whether the members and outputs of an engine follow each tensor alone.

Loading the present bits again must change nothing. For every tensor by itself, loading other bits
must change the members or outputs of each of its layers, and loading the first bits again must
restore them, bit for bit. A loader that silently does nothing, or updates only other tensors, fails
these tests.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any, Final

from deltachain.errors import EngineVersionError, TensorMismatchError
from deltachain.kernels.protocol import LiveBits, same_bits
from deltachain.replica.engine import EngineModel
from deltachain.replica.layout.classes import ORDER, TensorClass
from deltachain.replica.layout.findings import (
    Findings,
    Links,
    all_layers,
    components,
    group_of,
    links_of,
)
from deltachain.replica.layout.loaded_checkpoint import LoadedCheckpoint, WeightsFactory, mixed
from deltachain.replica.layout.members import Members, SavedBits, may_hide_tensors
from deltachain.replica.layout.model_state import (
    RELOADS,
    LoadGroup,
    LoadMethod,
    ModelState,
    load_with,
    modules_in,
)
from deltachain.replica.windows import Placement

# A loader might overwrite tensors that it was not given with their first bits or a constant, which
# would change nothing if these were stored already.


TURN: Final = 1
"""Turn of the other bits: not the one that a trial loads, so that equal tensors differ."""


@dataclass(frozen=True, slots=True)
class Untouched:
    """Decided tensors that a trial does not load.

    Attributes:
        model: The rank's model; not in use meanwhile.
        source: The checkpoint that the engine loaded.
        placements: Placements of the tensors that are written in place.
        groups: Groups of the tensors that the engine loads, with the method.
    """

    model: EngineModel
    source: LoadedCheckpoint
    placements: Mapping[str, Sequence[Placement]]
    groups: Sequence[tuple[LoadMethod, LoadGroup]] = ()

    def write(self, *, other: bool) -> None:
        """Write or load other bits of all of them, or the first ones."""
        for name, places in self.placements.items():
            write_bits(places, self.source.other(name, TURN) if other else self.source.bits(name))
        for method, group in self.groups:
            changed = group.names if other else ()
            weights = mixed(self.source.clones, group.names, changed, TURN)
            load_with(self.model, method, group.layers, weights)

    def lost(self) -> frozenset[str]:
        return frozenset(
            name
            for name, places in self.placements.items()
            if not holds_bits(places, self.source.other(name, TURN))
        )


def write_bits(places: Sequence[Placement], bits: LiveBits) -> None:
    for place in places:
        new: Any = place.take(bits)
        place.view[...] = new


def holds_bits(places: Sequence[Placement], bits: LiveBits) -> bool:
    return all(same_bits(place.view, place.take(bits)) for place in places)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a trial.

    Attributes:
        refused: Reasons why groups cannot be loaded by this method, by their first tensor; empty
            reasons if the engine does not have the method.
        touched: Live tensors that other bits of some tensor changed.
        idle: Tensors of the other groups that changed nothing.
        beside: Tensors of the other groups that changed members of a layer, but not its output.
        moved: Tensors that were not stored where they were recorded.
    """

    refused: Mapping[str, str] = field(default_factory=dict)
    touched: frozenset[str] = frozenset()
    idle: frozenset[str] = frozenset()
    beside: frozenset[str] = frozenset()
    moved: frozenset[str] = frozenset()

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(
            {**self.refused, **other.refused},
            self.touched | other.touched,
            self.idle | other.idle,
            self.beside | other.beside,
            self.moved | other.moved,
        )


@dataclass(frozen=True, slots=True)
class Trial:
    """A load method, tried on groups of tensors.

    Attributes:
        state: State of the model; restored afterwards.
        method: Method to try.
        weights: Factory of tensors of the checkpoint that the model holds.
        links: Layers that must follow each tensor.
        untouched: Decided tensors that are not loaded, and must keep their bits.
        derived: Live tensors and numbers that must follow each tensor.
        vectors: Tensors of one dimension or none.
        placed: Tensors that are stored in the model bit by bit.
        displaced: Function that returns the tensors not at their recorded places, given the names
            of tensors and of those among them that were loaded with other bits.
    """

    state: ModelState
    method: LoadMethod
    weights: WeightsFactory
    links: Mapping[str, frozenset[str]]
    untouched: Untouched
    derived: Mapping[str, frozenset[str]] = field(default_factory=dict)
    vectors: Container[str] = ()
    placed: Container[str] = ()
    displaced: Callable[[Iterable[str], Container[str]], frozenset[str]] = lambda *_: frozenset()

    def run(self, groups: Sequence[LoadGroup]) -> Outcome:
        """Try groups without common layers together; each by itself if anything fails."""
        known = [group for group in groups if group.layers]
        left = [group for group in groups if not group.layers]
        first, *more = _without_common_layers(known) or [[]]
        outcomes: list[Outcome] = []
        try:
            outcomes += [self._try(some) for some in (first, *more)]
        except Exception:  # noqa: BLE001 - an engine's loader may raise anything
            self._put_back(known)
            left = list(groups)
        for group in left:
            with self._refusing([group], outcomes):
                outcomes.append(self._try([group]))
        tried = sum(outcomes, Outcome())
        followed = [group for group in groups if group.names[0] not in tried.refused]
        return tried + self._apart(followed, tried.touched)

    def _apart(self, groups: Sequence[LoadGroup], touched: frozenset[str]) -> Outcome:
        try:
            return Outcome(moved=self._expect_apart(groups, touched))
        except Exception:  # noqa: BLE001 - a loader may raise anything; now find the group
            self._put_back(groups)
        outcomes: list[Outcome] = []
        for group in groups:
            with self._refusing([group], outcomes):
                self._expect_apart([group], touched)
        refused = sum(outcomes, Outcome()).refused
        left = [group for group in groups if group.names[0] not in refused]
        with self._refusing(left, outcomes):
            outcomes.append(Outcome(moved=self._expect_apart(left, touched)))
        return sum(outcomes, Outcome())

    @contextmanager
    def _refusing(self, groups: Sequence[LoadGroup], outcomes: list[Outcome]) -> Iterator[None]:
        try:
            yield
        except Exception as exc:  # noqa: BLE001 - an engine's loader may raise anything
            self._put_back(groups)
            told = exc.args[0] if isinstance(exc, TensorMismatchError) else repr(exc)
            has_method = not isinstance(exc, EngineVersionError)
            why = f"loading it again fails: {told}"[:200] if has_method else ""
            outcomes.append(Outcome({group.names[0]: why for group in groups}))

    def _put_back(self, groups: Sequence[LoadGroup]) -> None:
        """Restore the model; its own loading may restore memory that cannot be inspected."""
        self.state.put_back(partial(self._load, groups, {}))

    def _try(self, groups: Sequence[LoadGroup]) -> Outcome:
        """Try groups of known layers together, or a single one; raise if it is not exact."""
        if not groups:
            return Outcome()
        self._load(groups, {})
        self.state.expect_same()
        seen = _Seen(self, frozenset(group.names[0] for group in groups))
        for names in zip_longest(*(group.names for group in groups)):
            picked = {n: g for n, g in zip(names, groups, strict=True) if n is not None}
            self._load(picked.values(), picked)
            seen.look(picked)
            self._load(picked.values(), {})
            self.state.expect_same()
        return seen.outcome(self._expect_repeatable(groups))

    def _expect_repeatable(self, groups: Sequence[LoadGroup]) -> frozenset[str]:
        """Refuse a loader whose result differs when the same bits are loaded again.

        Returns:
            Tensors that were not stored where they were recorded.
        """
        others = {name: group for group in groups for name in group.names}
        self._load(groups, others)
        once = ModelState(self.state.model, SavedBits(self.state.model.tensors()))
        self._load(groups, others)
        once.expect_same()
        moved = self.displaced(others, others)
        self._load(groups, {})
        self.state.expect_same()
        return moved

    def _expect_apart(self, groups: Sequence[LoadGroup], touched: frozenset[str]) -> frozenset[str]:
        """Refuse a loader that changes tensors other than the given ones; all have other bits.

        A swap loads only changed groups, so any two of them must be separable: subsets by the
        binary digits of their numbers are loaded in turn. Tensors in other layers may have been
        ``touched``.

        Returns:
            Tensors that were loaded, but not stored where they were recorded.
        """
        if not groups:
            return frozenset()
        others = {name: group for group in groups for name in group.names}
        self._expect_kept(groups, others, touched)
        once = ModelState(self.state.model, SavedBits(self.state.model.tensors()))
        moved = self.displaced(others, others)
        for half in halves(groups):
            self._load(half, others)
            once.expect_same()
        self.untouched.write(other=False)
        self._load(groups, {})
        self.state.expect_same()
        return moved

    def _expect_kept(
        self, groups: Sequence[LoadGroup], others: Mapping[str, LoadGroup], touched: frozenset[str]
    ) -> None:
        """Load other bits of groups; all other tensors have other bits too, and must keep them."""
        self.untouched.write(other=True)
        follow = {self.state.owner[name] for name in touched if name in self.state.owner}
        mine = follow.union(*(group.layers for group in groups))
        beside = frozenset(self.state.modules) - mine if all(g.layers for g in groups) else None
        before = ModelState(
            self.state.model, SavedBits(self.state.model.tensors()), beside or frozenset()
        )
        self._load(groups, others)
        if beside:
            before.expect_same(beside)
        for name in sorted(self.untouched.lost()):
            raise TensorMismatchError(f"it overwrites {name}", tensor=name)

    def _load(self, groups: Iterable[LoadGroup], others: Mapping[str, LoadGroup]) -> None:
        groups = list(groups)
        names = [name for group in groups for name in group.names]
        layers = frozenset().union(*(group.layers for group in groups))
        if not all(group.layers for group in groups):
            layers = frozenset()
        load_with(self.state.model, self.method, layers, mixed(self.weights, names, others))


class _Seen:
    """A record of the changes that loading other bits of each tensor alone causes."""

    def __init__(self, trial: Trial, groups: frozenset[str]) -> None:
        self.trial, self.state = trial, trial.state
        self.left = set(groups)
        self.touched: set[str] = set()
        self.idle: set[str] = set()
        self.moved: set[str] = set()
        self.beside: dict[str, tuple[LoadGroup, frozenset[str]]] = {}
        self.followed: dict[LoadGroup, frozenset[str]] = {}

    def look(self, picked: Mapping[str, LoadGroup]) -> None:
        """Judge the tensors just loaded with other bits, one of each group."""
        changed = self.state.changed()
        self.touched |= changed
        for name, group in picked.items():
            if name not in self.trial.placed:  # others may be stored at unrecorded places
                self.moved |= self.trial.displaced(group.names, picked)
            why = self._judge(name, group, changed)
            if why:
                raise TensorMismatchError(why, tensor=name)
        self._expect_followed(picked, changed)

    def _expect_followed(self, picked: Mapping[str, LoadGroup], changed: frozenset[str]) -> None:
        """Refuse loads that change members of another layer, but not its output."""
        state = self.state
        mine = frozenset().union(*(group.layers for group in picked.values()))
        beside = {state.owner[name] for name in changed if name in state.owner} - mine
        beside &= state.outputs.keys() & state.processed
        if not mine or not beside:
            return
        for layer in sorted(beside - state.follows(frozenset(beside))):
            raise TensorMismatchError(
                f"{layer} does not change with {min(picked)}", tensor=min(picked)
            )

    def _judge(self, name: str, group: LoadGroup, changed: frozenset[str]) -> str:
        """Return why a tensor is not followed; empty if it is, or if other tests must show it.

        A tensor that changes nothing stays in its group: it may act only together with others, or
        be overwritten by one of them. That does not apply to a loader alone.
        """
        state, trial = self.state, self.trial
        layers = group.layers or frozenset(state.modules)
        live = {n for n in changed if n in state.owner and state.owner[n] in layers}
        holding = frozenset().union(*(state.memory.overlapping(state.tensors[n]) for n in live))
        links = trial.links.get(name, frozenset())
        found = state.follows(layers | holding | links)
        if not found & layers and not live:
            self.idle.add(name)
            must = name in trial.placed or trial.method == "loaded"
            return f"nothing changes with {name}" if must else ""
        left = trial.derived.get(name, frozenset()) - changed
        if left:
            return f"{min(left)} does not change with {name}"
        self.left.discard(group.names[0])
        self.followed[group] = self.followed.get(group, frozenset()) | (found & layers)
        missing = (links | holding) - found
        if missing:
            holders = [state.memory.overlapping(state.tensors[n]) for n in live]
            alone, shared = (
                frozenset().union(*(one for one in holders if (len(one) == 1) is single))
                for single in (True, False)
            )
            if not missing <= alone - shared or name not in trial.vectors:
                return f"{min(missing)} does not change with {name}"
            self.beside[name] = group, missing
        return ""

    def outcome(self, moved: frozenset[str]) -> Outcome:
        """Return the results; refuse a layer that nothing shows to be created again.

        A vector of a layer that does not change its output does not show how it was loaded; the
        matrix beside it does.
        """
        for name, (group, layers) in self.beside.items():
            left = layers - self.followed.get(group, frozenset())
            if left:
                raise TensorMismatchError(f"{min(left)} does not change with {name}", tensor=name)
        refused = {first: f"nothing changes with {first}" for first in self.left}
        touched, idle = frozenset(self.touched), frozenset(self.idle)
        return Outcome(refused, touched, idle, frozenset(self.beside), moved.union(self.moved))


def _without_common_layers(groups: Sequence[LoadGroup]) -> list[list[LoadGroup]]:
    """Split groups into turns without common layers, where each would seem to follow the other."""
    turns: list[list[LoadGroup]] = []
    taken: list[set[str]] = []
    for group in groups:
        turn = next((n for n, one in enumerate(taken) if one.isdisjoint(group.layers)), len(turns))
        if turn == len(turns):
            turns.append([])
            taken.append(set())
        turns[turn].append(group)
        taken[turn] |= group.layers
    return turns


def halves(groups: Sequence[LoadGroup]) -> Iterator[list[LoadGroup]]:
    """Yield subsets of the groups that separate any two of them; none for a single group."""
    for digit in range((len(groups) - 1).bit_length()):
        for value in (0, 1):
            yield [one for at, one in enumerate(groups) if (at >> digit) & 1 == value]


def find_untestable(state: ModelState, source: LoadedCheckpoint, findings: Findings) -> Findings:
    """Find layers whose output cannot be computed, and whose members cannot all be inspected.

    Only layers with post-load processing can be such layers: either they are already, or processing
    them once more shows it. The former are refused before anything is loaded, since restoring them
    could not be verified.
    """
    links = links_of(state, source, findings, source.present)
    doubtful = (all_layers(links, links) & state.processed) - state.outputs.keys()
    if not doubtful:
        return findings
    for layer in sorted(doubtful & state.opaque):
        name = min(name for name in links if layer in links[name])
        raise TensorMismatchError(
            f"{layer} keeps its weights where they can be neither inspected nor tested: "
            f"{name!r} cannot be written",
            tensor=name,
            hint="set linear and MoE backends that keep weights in tensors",
        )
    names = [name for name in links if links[name] & doubtful]
    scope = state.memory.tied(all_layers(links, names))
    untestable = _opaque_after_reload(state, source, names, scope, doubtful)
    reasons = {
        name: f"the weights that {min(links[name] & untestable)} computes with cannot be inspected"
        for name in names
        if links[name] & untestable
    }
    return replace(findings.only_reloaded(reasons), untestable=untestable)


def _opaque_after_reload(
    state: ModelState,
    source: LoadedCheckpoint,
    names: Sequence[str],
    scope: frozenset[str],
    doubtful: frozenset[str],
) -> frozenset[str]:
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
            if group.names[0] not in findings.classes
            and all(ORDER[findings.required.get(n, method)] <= ORDER[method] for n in group.names)
        ]
        findings, refused = _try(state, source, findings, method, left)
        for name, reason in refused.items():
            why[name] = reason or why[name] or "the engine cannot load it again"
    return _decided(findings, groups, why)


def _groups_to_reload(state: ModelState, findings: Findings, links: Links) -> list[LoadGroup]:
    touched = all_layers(links, findings.reload_only)
    names = [n for n in links if n in findings.reload_only or links[n] & touched]
    grown = _with_neighbours(names, links, findings.joined)
    groups = [group_of(state, links, one) for one in components(grown, links, findings.joined)]
    return [group for group in groups if not findings.reload_only.isdisjoint(group.names)]


def _with_neighbours(names: list[str], links: Links, joined: Iterable[frozenset[str]]) -> list[str]:
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


def _decided(findings: Findings, groups: Sequence[LoadGroup], why: Mapping[str, str]) -> Findings:
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

    Groups that cannot be loaded each by itself may be loaded together. Returns the findings, and
    why the method fails for groups, by their first tensor.
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
        untouched=Untouched(
            state.model,
            source,
            {name: findings.placements[name] for name in findings.in_place() if name not in links},
            [one for one in findings.groups if links.keys().isdisjoint(one[1].names)],
        ),
    )


def _displaced(
    source: LoadedCheckpoint, findings: Findings, names: Iterable[str], others: Container[str]
) -> frozenset[str]:
    return frozenset(
        name
        for name in findings.readable.intersection(names)
        if not holds_bits(
            findings.placements[name],
            source.other(name) if name in others else source.bits(name),
        )
    )


def decide_remaining(findings: Findings) -> Findings:
    left: dict[str, TensorClass] = {
        name: "in_place" if found else "absent"
        for name, found in findings.placements.items()
        if name not in findings.classes
    }
    return replace(findings, classes={**findings.classes, **left})
