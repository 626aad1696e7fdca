"""Test whether the members and outputs of an engine follow each tensor alone.

For every tensor by itself, loading other bits must change the members or outputs of each of its
layers, and loading the first bits again must restore them, bit for bit; the same bits always give
the same. A loader that silently does nothing, or updates only other tensors, fails these tests.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial, reduce
from itertools import zip_longest
from math import comb
from operator import or_
from typing import Any, Final

from deltachain.errors import EngineVersionError, TensorMismatchError
from deltachain.kernels.protocol import LiveBits, same_bits
from deltachain.replica.freed_memory import trim_memory
from deltachain.replica.placements import Placement

from .classes import ORDER, TensorClass
from .findings import (
    Findings,
    Links,
    all_layers,
    components,
    group_of,
    kinds_of,
    links_of,
    some_of_each,
)
from .load_sets import LOADS, UnitChanges, crossing, separating, sets_of_kinds
from .loaded_checkpoint import flipped_bit
from .model_state import (
    METHODS,
    PART,
    RELOADS,
    TOGETHER,
    LoadGroup,
    LoadMethod,
    ModelState,
    batches,
    modules_in,
    scope_of,
)
from .module_members import Members, may_hide_tensors

MANY: Final = 16
"""Number of tensors of a group up to which a reload gives other bits to one of them at a time."""

TURN: Final = 1
"""Turn of the other bits of what is not loaded: equal tensors differ from those that are."""


def write_bits(places: Sequence[Placement], bits: LiveBits) -> None:
    for place in places:
        new: Any = place.take(bits)
        place.view[...] = new


def flip_bits(places: Sequence[Placement]) -> None:
    """Double or halve every number, or flip the last bit of integers; twice changes nothing."""
    for place in places:
        view: Any = place.view
        view ^= flipped_bit(place.live.dtype)


def holds_bits(places: Sequence[Placement], bits: LiveBits) -> bool:
    return all(same_bits(place.view, place.take(bits)) for place in places)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a trial.

    ``refused`` has reasons why groups cannot be loaded by this method, by their first tensor; empty
    reasons if the engine does not have the method. ``touched`` live tensors were changed by other
    bits of some tensor. Of the tensors of other groups, ``idle`` ones changed nothing, ``beside``
    ones members of a layer, but not its output, and ``moved`` ones are not stored where they were
    recorded.
    """

    refused: dict[str, str] = field(default_factory=dict)
    touched: frozenset[str] = frozenset()
    idle: frozenset[str] = frozenset()
    beside: frozenset[str] = frozenset()
    moved: frozenset[str] = frozenset()

    def __add__(self, other: "Outcome") -> "Outcome":
        return Outcome(*(getattr(self, f.name) | getattr(other, f.name) for f in fields(self)))

    def silent(self, group: LoadGroup) -> frozenset[str]:
        """Return the tensors of a group that changed no output."""
        return (self.idle | self.beside).intersection(group.names)


@dataclass(frozen=True)
class Trial:
    """A load method, tried on groups of tensors; the state is restored afterwards."""

    state: ModelState
    findings: Findings
    method: LoadMethod
    groups: Sequence[LoadGroup]

    @cached_property
    def links(self) -> Links:
        names = [name for group in self.groups for name in group.names]
        return links_of(self.state, self.findings, names)

    def run(self, begin: Callable[[], object] | None = None) -> Outcome:
        """Try groups without common layers together; each by itself if anything fails.

        ``begin`` gives all tensors other bits by another method; then any failure is raised.
        """
        layers = [layer for group in self.groups for layer in group.layers]
        in_turn = all(group.layers for group in self.groups) and len(layers) == len(set(layers))
        specs = self.state.source.specs
        kept = [group for group in self.groups if not group.layers <= self.state.loadable]
        is_small = sum(specs[name].nbytes for one in kept for name in one.names) <= PART
        watch = None
        if in_turn and is_small and self.method in RELOADS:
            # A reload takes all tensors of its layers: one tensor changes at a time meanwhile.
            watch = _Seen(self, self.groups)
            try:
                return self._expect_apart(self.groups, watch=watch, in_turn=True, begin=begin)
            except Exception:
                self._put_back(self.groups)
                if begin is not None:
                    raise
        if begin is not None:
            raise TensorMismatchError("not all groups can be loaded at once")
        tried = self.each(self.groups, at_once=watch is None)
        followed = [group for group in self.groups if group.names[0] not in tried.refused]
        apart = partial(self._expect_apart, touched=tried.touched)
        for way in (True, False) if in_turn else (False,):
            try:
                return tried + apart(followed, in_turn=way)
            except Exception:  # noqa: BLE001 - a loader may raise anything; now find the group
                self._put_back(followed)
        refused: dict[str, str] = {}
        for group in followed:
            refused |= self._attempt([group], apart).refused
        left = [group for group in followed if group.names[0] not in refused]
        return tried + Outcome(refused) + self._attempt(left, apart)

    def each(self, groups: Sequence[LoadGroup], *, at_once: bool = True) -> Outcome:
        """Try tensors alone; groups without common layers together, unless anything fails.

        Without ``at_once``, only groups of one kind are tried together.
        """
        known = [group for group in groups if group.layers]
        left = [group for group in groups if not group.layers]
        parts = list(batches(known, lambda group: group.names, self.state.source.specs, PART))
        tried = Outcome()
        for part in parts:
            found = self._try_at_once(part) if at_once else None
            if found is None:
                kinds = kinds_of(self.state, self.findings, part).values()
                tried = sum(map(self._try_kind, kinds), tried)
                continue
            tried += found
            followed = [group for group in part if group.names[0] not in tried.refused]
            if len(parts) > 1 and followed and self.method in RELOADS:
                self.state.release(followed, partial(self._load, followed))
        return sum((self._attempt([group], self._try) for group in left), tried)

    def _try_at_once(self, groups: Sequence[LoadGroup]) -> Outcome | None:
        try:
            return sum(map(self._try, _without_common_layers(groups)), Outcome())
        except Exception:  # noqa: BLE001 - an engine's loader may raise anything
            self._put_back(groups)
            return None

    def _try_kind(self, groups: Sequence[LoadGroup]) -> Outcome:
        """Try groups of one kind together, or else alone; if two fail, refuse the others."""
        found = self._try_at_once(groups) if len(groups) > 2 else None
        if found is not None:
            return found
        drawn = random.SystemRandom().sample(list(groups), len(groups))
        tried = sum((self._attempt([group], self._try) for group in drawn[:2]), Outcome())
        left = [group.names[0] for group in drawn[2:]]
        if len(tried.refused) == 2:
            return tried + Outcome(dict.fromkeys(left, tried.refused[drawn[0].names[0]]))
        return sum((self._attempt([group], self._try) for group in drawn[2:]), tried)

    def _attempt(
        self, groups: Sequence[LoadGroup], test: Callable[[Sequence[LoadGroup]], Outcome]
    ) -> Outcome:
        try:
            return test(groups)
        except Exception as exc:  # noqa: BLE001 - an engine's loader may raise anything
            self._put_back(groups)
            told = exc.args[0] if isinstance(exc, TensorMismatchError) else repr(exc)
            has_method = not isinstance(exc, EngineVersionError)
            why = f"loading it again fails: {told}"[:200] if has_method else ""
            return Outcome({group.names[0]: why for group in groups})

    def _put_back(self, groups: Sequence[LoadGroup]) -> None:
        """Restore the model; its own loading may restore memory that cannot be inspected."""
        self.state.put_back(partial(self._load, groups))

    def _try(self, groups: Sequence[LoadGroup]) -> Outcome:
        """Try groups of known layers together, or a single one; raise if it is not exact.

        One tensor of each group at a time has other bits. The load of the next restores them.
        """
        seen = _Seen(self, groups)
        large = self._large(groups)
        if large:  # before they are looked at: is this a load that restores them at all?
            self._load(large, [name for group in large for name in group.names])
            self._load(large)
            self.state.expect_same()
        self._look_alone({one: one.names for one in groups if one not in large}, seen)
        self._look_at_sets(large, seen)
        return seen.outcome()

    def _large(self, groups: Iterable[LoadGroup]) -> list[LoadGroup]:
        """Return the groups of so many tensors that each reload takes other bits of several."""
        found = [one for one in groups if MANY < len(one.names) <= comb(LOADS, 3) and one.layers]
        return found if self.method in RELOADS else []

    def _look_alone(
        self,
        names: Mapping[LoadGroup, Sequence[str]],
        watch: "_Seen",
        changed: Sequence[LoadGroup] = (),
    ) -> None:
        """Load other bits of one tensor of each group after another; restore them.

        Groups that are ``changed`` have other bits at first.
        """
        for turn in zip_longest(*names.values()):
            picked = {n: g for n, g in zip(turn, names, strict=True) if n is not None}
            self._load(dict.fromkeys([*changed, *picked.values()]), picked)
            watch.look(picked)
            changed = list(picked.values())
        if changed:
            self._load(changed)
            self.state.expect_same()

    def _look_at_sets(self, groups: Sequence[LoadGroup], watch: "_Seen") -> None:
        """Load other bits of sets of tensors of each group; of what these do not show, alone."""
        if not groups:
            return
        units = UnitChanges(self.state, watch.reached(groups))
        doubtful: dict[LoadGroup, list[str]] = {group: [] for group in groups}
        changed: list[LoadGroup] = []
        for kinds in zip_longest(*(sets_of_kinds(group.names) for group in groups), fillvalue=()):
            for number, sets in enumerate(zip_longest(*kinds, fillvalue=())):
                picked = {n: g for some, g in zip(sets, groups, strict=True) for n in some}
                self._load(dict.fromkeys([*changed, *picked.values()]), picked)
                units.look(number)
                watch.glance(picked)
                changed = list(dict.fromkeys(picked.values()))
            loads = units.loads()
            for group, sets_of_group in zip(groups, kinds, strict=True):
                doubtful[group] += watch.unseen(group, sets_of_group, loads)
        self._look_alone(doubtful, watch, changed)

    def _expect_apart(
        self,
        groups: Sequence[LoadGroup],
        touched: frozenset[str] = frozenset(),
        *,
        in_turn: bool = False,
        watch: "_Seen | None" = None,
        begin: Callable[[], object] | None = None,
    ) -> Outcome:
        """Refuse a loader that changes tensors other than the given ones; all have other bits.

        A swap loads only changed groups, so any two of them must be separable: each is loaded
        without the other. The result must be the same again whenever the same bits are loaded.
        Tensors in other layers may have been ``touched``. Groups of different layers are loaded
        ``in_turn``, their other bits and their first, and two of each kind once more, except single
        tensors that have their other bits by ``begin``: each load of these is compared. ``watch``
        sees that each single tensor is followed meanwhile.
        """
        if not groups:
            return Outcome()
        others = [name for group in groups for name in group.names]
        rows, columns = crossing(groups) if in_turn else ([groups], [groups])
        last = self._expect_kept(rows, others, touched, begin)
        moved = _displaced(self, others, others)
        few = some_of_each(self.state, self.findings, groups, 2) if in_turn else []
        few = [group for group in few if begin is None or len(group.names) > 1]
        for some in filter(None, [few] if in_turn else separating(groups)):
            self._load(some, others)
            last.expect_same()
        self.write_untouched(other=False)
        large = self._large(groups) if watch is not None else []
        small = [group for group in groups if group not in large]
        if watch is not None and small:
            last = self._look_at_each(small, watch, last)
            trim_memory()
        for column in columns:
            if in_turn:
                last.expect_same(scope_of(column))
            self._load(column)
        self.state.expect_same()
        if watch is not None:
            self._look_at_sets(large, watch)
        return (watch.outcome() if watch else Outcome()) + Outcome(moved=moved)

    def _look_at_each(
        self, groups: Sequence[LoadGroup], watch: "_Seen", before: ModelState
    ) -> ModelState:
        """Load the first bits of one tensor of each group after another; return the last state.

        All tensors have other bits before, and the last one of each group still has afterwards.
        """
        for turn in range(1, max(len(group.names) for group in groups)):
            left = [group for group in groups if len(group.names) > turn]
            others = {name for group in groups for name in group.names[turn:] or group.names[-1:]}
            self._load(left, others)
            watch.look({group.names[turn - 1]: group for group in left}, others, before)
            before = self.state.now()
        watch.look({group.names[-1]: group for group in groups})
        return before

    def _expect_kept(
        self,
        rows: Sequence[Sequence[LoadGroup]],
        others: Sequence[str],
        touched: frozenset[str],
        begin: Callable[[], object] | None,
    ) -> ModelState:
        """Load other bits of groups; all other tensors have other bits too, and must keep them.

        What has other bits by another method must not change. Returns the state afterwards.
        """
        groups = [group for row in rows for group in row]
        if begin is not None:
            begin()
            trim_memory()
        self.write_untouched(other=True)
        follow = {self.state.owner[name] for name in touched if name in self.state.owner}
        mine = follow.union(*(group.layers for group in groups))
        is_known = all(group.layers for group in groups)
        beside = frozenset(self.state.modules) - mine if is_known else frozenset()
        before = self.state.now(None if begin else beside)
        first = before if begin else self.state
        loaded = [before for _ in rows if begin]
        for row in rows:
            if len(rows) > 1:
                first.expect_same(scope_of(row))
            self._load(row, others)
            loaded += [self.state.now(scope_of(row))] if len(rows) > 1 and not begin else []
        for after, row in zip(loaded, rows, strict=False):
            after.expect_same(scope_of(row))
        if beside:
            before.expect_same(beside)
        for name in sorted(self.lost()):
            raise TensorMismatchError(f"it overwrites {name}", tensor=name)
        return before if begin else self.state.now()

    def _load(self, groups: Iterable[LoadGroup], others: Iterable[str] = ()) -> None:
        groups = list(groups)
        names = [name for group in groups for name in group.names]
        self.state.load(self.method, names, others, scope_of(groups))

    # A loader might overwrite tensors that it was not given with their first bits or a constant,
    # which would change nothing if these were stored already: they have other bits meanwhile.

    def write_untouched(self, *, other: bool) -> None:
        """Write or load other bits of all decided tensors that are not loaded, or the first."""
        source = self.state.source
        for name in self._untouched():
            bits = source.other(name, TURN) if other else source.bits(name)
            write_bits(self.findings.placements[name], bits)
        for method in METHODS:
            groups = [one for way, one in self.findings.groups if way == method]
            left = [one for one in groups if self.links.keys().isdisjoint(one.names)]
            for some in batches(left, lambda group: group.names, source.specs, TOGETHER):
                names = [name for group in some for name in group.names]
                self.state.load(method, names, names if other else (), scope_of(some), TURN)

    def lost(self) -> frozenset[str]:
        placements, other = self.findings.placements, self.state.source.other
        return frozenset(
            n for n in self._untouched() if not holds_bits(placements[n], other(n, TURN))
        )

    def _untouched(self) -> list[str]:
        return [name for name in self.findings.in_place() if name not in self.links]


class _Seen:
    """A record of the changes that loading other bits of each tensor alone causes."""

    def __init__(self, trial: Trial, groups: Iterable[LoadGroup]) -> None:
        self.trial = trial
        self.left = {group.names[0] for group in groups}
        self.touched, self.idle, self.moved = set[str](), set[str](), set[str]()
        self.beside: dict[str, tuple[LoadGroup, frozenset[str]]] = {}
        self.followed: dict[LoadGroup, frozenset[str]] = {}

    def look(
        self,
        picked: Mapping[str, LoadGroup],
        others: Collection[str] = (),
        before: ModelState | None = None,
    ) -> None:
        """Judge the tensors just loaded with bits other than before, one of each group.

        ``others`` have other bits than at first; by default the picked ones do, and no more.
        """
        before, others = before or self.trial.state, others or picked
        changed = self._changed(picked, others, before)
        followed = before.follows(self._reached(picked, changed, before))
        for name, group in picked.items():
            why = self._judge(name, group, changed, before, followed)
            if why:
                raise TensorMismatchError(why, tensor=name)
        self._expect_followed(picked, changed, before)

    def _changed(
        self, picked: Mapping[str, LoadGroup], others: Collection[str], state: ModelState
    ) -> frozenset[str]:
        changed = state.changed()
        self.touched |= changed
        placements = self.trial.findings.placements
        unrecorded = (g for n, g in picked.items() if not placements[n])  # stored anywhere
        for group in dict.fromkeys(unrecorded):
            self.moved |= _displaced(self.trial, group.names, others)
        return changed

    def glance(self, picked: Mapping[str, LoadGroup]) -> None:
        """Judge what sets of tensors change beside their groups, as :meth:`look` does."""
        state = self.trial.state
        self._expect_followed(picked, self._changed(picked, picked, state), state)

    def reached(self, groups: Iterable[LoadGroup]) -> frozenset[str]:
        """Return all layers that may have to follow any tensor of some groups."""
        picked = {name: group for group in groups for name in group.names}
        return self._reached(picked, frozenset(self.trial.state.tensors), self.trial.state)

    def unseen(
        self,
        group: LoadGroup,
        sets: Sequence[Collection[str]],
        loads: Mapping[str, frozenset[int]],
    ) -> list[str]:
        """Return the tensors of some sets that the loads of these do not show to be followed.

        For each tensor, units of the same members and outputs must have changed in exactly its
        loads as :meth:`look` expects to change with it alone; and of every layer with a member that
        changed in all of them, and so may depend on it.
        """
        state, found = self.trial.state, list[str]()
        shown = state.outputs.keys() & state.processed
        ever = {one: reduce(or_, seen, 0) for one, seen in loads.items()}
        mine = [one for one in loads if state.owner.get(one) in group.layers]
        sharers = {one: state.memory.overlapping(state.tensors[one]) for one in mine}
        codes: dict[str, int] = defaultdict(int)
        for number, names in enumerate(sets):
            for name in names:
                codes[name] |= 1 << number
        for name, code in codes.items():
            exact = {one for one, seen in loads.items() if code in seen}
            holders = [sharers[one] for one in mine if ever[one] & code == code]
            needed = self.trial.links.get(name, frozenset()).union(*holders)
            owners = {state.owner.get(one, one.removesuffix("()")) for one in exact}
            followed = {o for o in owners if o not in shown or f"{o}()" in exact}
            followed &= group.layers | needed
            live = exact.intersection(mine)
            derived = self.trial.findings.derived.get(name, frozenset())
            if not (followed & group.layers or live) or derived - exact or needed - followed:
                found.append(name)
                continue
            self.left.discard(group.names[0])
            self.followed[group] = self.followed.get(group, frozenset()) | (followed & group.layers)
        return found

    def _expect_followed(
        self, picked: Mapping[str, LoadGroup], changed: frozenset[str], state: ModelState
    ) -> None:
        """Refuse loads that change members of another layer, but not its output."""
        mine = frozenset().union(*(group.layers for group in picked.values()))
        beside = {state.owner[name] for name in changed if name in state.owner} - mine
        beside &= state.outputs.keys() & state.processed
        if not mine or not beside:
            return
        for layer in sorted(beside - state.follows(frozenset(beside))):
            raise TensorMismatchError(
                f"{layer} does not change with {min(picked)}", tensor=min(picked)
            )

    def _reached(
        self, picked: Mapping[str, LoadGroup], changed: frozenset[str], state: ModelState
    ) -> frozenset[str]:
        """Return all layers that may have to follow the picked tensors."""
        every, links = frozenset(state.modules), self.trial.links
        layers = frozenset().union(*(group.layers or every for group in picked.values()))
        live = [state.tensors[name] for name in changed if state.owner.get(name) in layers]
        linked = [links.get(name, frozenset()) for name in picked]
        return layers.union(*linked, *map(state.memory.overlapping, live))

    def _judge(
        self,
        name: str,
        group: LoadGroup,
        changed: frozenset[str],
        state: ModelState,
        followed: frozenset[str],
    ) -> str:
        """Return why a tensor is not followed; empty if it is, or if other tests must show it.

        A tensor that changes nothing stays in its group: it may act only together with others, or
        be overwritten by one of them. That does not apply to a loader alone.
        """
        trial = self.trial
        layers = group.layers or frozenset(state.modules)
        live = {n for n in changed if n in state.owner and state.owner[n] in layers}
        holders = [state.memory.overlapping(state.tensors[n]) for n in live]
        needed = trial.links.get(name, frozenset()).union(*holders)
        found = followed & (layers | needed)
        if not found & layers and not live:
            self.idle.add(name)
            must = trial.findings.placements[name] or trial.method == "loaded"
            return f"nothing changes with {name}" if must else ""
        left = trial.findings.derived.get(name, frozenset()) - changed
        if left:
            return f"{min(left)} does not change with {name}"
        self.left.discard(group.names[0])
        self.followed[group] = self.followed.get(group, frozenset()) | (found & layers)
        missing = needed - found
        if missing:
            alone = frozenset().union(*(one for one in holders if len(one) == 1))
            shared = frozenset().union(*(one for one in holders if len(one) != 1))
            is_vector = len(state.source.specs[name].shape) < 2
            if not missing <= alone - shared or not is_vector:
                return f"{min(missing)} does not change with {name}"
            self.beside[name] = group, missing
        return ""

    def outcome(self) -> Outcome:
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
        return Outcome(refused, touched, idle, frozenset(self.beside), frozenset(self.moved))


def _without_common_layers(groups: Sequence[LoadGroup]) -> list[list[LoadGroup]]:
    """Split groups into turns without common layers, where each would seem to follow the other."""
    turns: list[tuple[list[LoadGroup], set[str]]] = []
    for group in groups:
        turn = next((one for one in turns if one[1].isdisjoint(group.layers)), None)
        if turn is None:
            turns.append(turn := ([], set()))
        turn[0].append(group)
        turn[1].update(group.layers)
    return [turn for turn, _ in turns]


def find_untestable(state: ModelState, findings: Findings) -> Findings:
    """Find layers whose output cannot be computed, and whose members cannot all be inspected.

    Only layers with post-load processing can be such layers: either they are already, or processing
    them once more shows it. The former are refused before anything is loaded, since restoring them
    could not be verified.
    """
    links = links_of(state, findings, state.source.present)
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
    untestable = _opaque_after_reload(state, names, scope, doubtful)
    reasons = {
        name: f"the weights that {min(links[name] & untestable)} computes with cannot be inspected"
        for name in names
        if links[name] & untestable
    }
    return replace(findings.only_reloaded(reasons), untestable=untestable)


def _opaque_after_reload(
    state: ModelState, names: Sequence[str], scope: frozenset[str], doubtful: frozenset[str]
) -> frozenset[str]:
    found: set[str] = set()
    processed: set[str] = set()
    for method in RELOADS:
        modules = modules_in(state.model.modules(), doubtful)
        members = {layer: Members(mine) for layer, mine in modules.items()}
        with suppress(Exception):
            state.load(method, names, layers=scope)
            processed |= doubtful
            found |= {n for n, one in members.items() if any(map(may_hide_tensors, one.replaced()))}
        state.put_back()
    return frozenset(found | (doubtful - processed))


def try_loading(state: ModelState, findings: Findings) -> Findings:
    """Load tensors that the engine computes or casts by its loader; failures must be reloaded."""
    names = [name for name in findings.reasons if name not in findings.reload_only]
    links = links_of(state, findings, names)
    by_layer = components(names, links, findings.joined)
    alone = components(names, dict.fromkeys(names, frozenset()), findings.joined)
    for grouped in (by_layer, alone):
        left = [one for one in grouped if findings.classes.keys().isdisjoint(one)]
        groups = [group_of(state, links, one) for one in left]
        findings, _ = _try(state, findings, "loaded", groups)
    failed = (name for name in names if name not in findings.classes)
    return replace(findings, reload_only=findings.reload_only.union(failed))


def try_reloading(
    state: ModelState, findings: Findings, begin: Callable[[], object] | None = None
) -> Findings:
    """Reload the layers of the remaining tensors whole; refuse those not updated exactly.

    With ``begin``, see :meth:`Trial.run`, raises unless its own reload can restore all of them.
    """
    groups = _groups_to_reload(state, findings)
    # A layer is reloaded whole: classes that were decided before are void.
    names = frozenset(name for group in groups for name in group.names)
    findings = replace(
        findings,
        classes={name: kind for name, kind in findings.classes.items() if name not in names},
        groups=tuple(one for one in findings.groups if names.isdisjoint(one[1].names)),
    )
    why = {group.names[0]: _obstacle(findings, group) for group in groups}
    testable = [group for group in groups if not why[group.names[0]]]
    for method in RELOADS:
        left = [
            group
            for group in testable
            if group.names[0] not in findings.classes
            and all(ORDER[findings.required.get(n, method)] <= ORDER[method] for n in group.names)
        ]
        if begin is not None and left != groups:
            raise TensorMismatchError("not all tensors can be reloaded")
        findings, refused = _try(state, findings, method, left, begin)
        begin = None
        for name, reason in refused.items():
            why[name] = reason or why[name] or "the engine cannot load it again"
    reasons, classes = dict(findings.reasons), dict(findings.classes)
    for group in groups:
        for name in group.names:
            reason = reasons.setdefault(name, "its layer is packed")
            if name not in classes:
                classes[name] = "refused"
                reasons[name] = f"{reason}; {why[group.names[0]] or 'no load method is proven'}"
    return replace(findings, reasons=reasons, classes=classes)


def _groups_to_reload(state: ModelState, findings: Findings) -> list[LoadGroup]:
    """Return groups of the tensors that must be reloaded, with all others of their layers."""
    links = links_of(state, findings, state.source.specs)
    touched = all_layers(links, findings.reload_only)
    names = [n for n in links if n in findings.reload_only or links[n] & touched]
    size = 0
    while size != len(names):
        size = len(names)
        near = (one for one in findings.joined if not one.isdisjoint(names))
        known = frozenset(names).union(*near)
        layers = all_layers(links, known)
        names = [name for name in links if name in known or links[name] & layers]
    groups = [group_of(state, links, one) for one in components(names, links, findings.joined)]
    return [group for group in groups if not findings.reload_only.isdisjoint(group.names)]


def _obstacle(findings: Findings, group: LoadGroup) -> str:
    """Return why no reload of a group can be proven; empty if one may be."""
    if not findings.overlapping.isdisjoint(group.names):
        return "the tensor loaded last would overwrite the other"
    if not findings.unverifiable.isdisjoint(group.names):
        return "loading it again would not verify it either"
    if group.layers & findings.untestable:
        return "and its layer cannot be tested"
    return "" if group.layers else "the layers it is loaded into are unknown"


def _try(
    state: ModelState,
    findings: Findings,
    method: LoadMethod,
    groups: Sequence[LoadGroup],
    begin: Callable[[], object] | None = None,
) -> tuple[Findings, Mapping[str, str]]:
    """Try a method, and decide the tensors that it proves.

    Groups that cannot be loaded each by itself may be loaded together. Returns the findings, and
    why the method fails for groups, by their first tensor.
    """
    findings, refused = _try_each(state, findings, method, groups, begin)
    left = [group for group in groups if group.names[0] in refused]
    if len(left) < 2 or not any(refused.values()):
        return findings, refused
    names = frozenset(name for group in left for name in group.names)
    links = links_of(state, findings, [name for name in state.source.specs if name in names])
    whole = group_of(state, links, list(links))
    findings, again = _try_each(state, findings, method, [whole])
    if not again:
        findings = replace(findings, joined=(*findings.joined, names))
    return findings, again and refused


def _try_each(
    state: ModelState,
    findings: Findings,
    method: LoadMethod,
    groups: Sequence[LoadGroup],
    begin: Callable[[], object] | None = None,
) -> tuple[Findings, Mapping[str, str]]:
    outcome = Trial(state, findings, method, groups).run(begin)
    refused = dict(outcome.refused)
    proven: list[LoadGroup] = []
    for group in groups:
        if group.names[0] in refused:
            continue
        why, silent = _doubt(state, outcome, group), outcome.silent(group)
        if not why and silent and method == "reloaded":
            so_far = _proven(findings, method, proven, outcome)
            why = _unconfirmed(state, so_far, group, silent)
        if why:
            refused[group.names[0]] = why
        else:
            proven.append(group)
    return _proven(findings, method, proven, outcome), refused


def _doubt(state: ModelState, outcome: Outcome, group: LoadGroup) -> str:
    """Return why a trial without failure proves nothing about a group; empty if it does."""
    specs, uniform = state.source.specs, state.source.uniform
    blank = [n for n in outcome.idle & outcome.silent(group) & uniform if specs[n].numel > 1]
    if blank:
        return f"nothing changes with {min(blank)}, whose elements are all equal"
    stray = outcome.moved.intersection(group.names) - uniform
    if stray:
        return f"other values loaded into {min(stray)} do not arrive where it was recorded"
    return ""


def _unconfirmed(
    state: ModelState, findings: Findings, group: LoadGroup, silent: frozenset[str]
) -> str:
    """Return why a reload may have left out tensors: a repack shows that they change something."""
    again = Trial(state, findings, "repacked", [group]).run()
    if again.refused or again.silent(group) != silent:
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


def _displaced(trial: Trial, names: Iterable[str], others: Iterable[str]) -> frozenset[str]:
    """Return tensors that are not where they were recorded; ``others`` have other bits."""
    source, findings, changed = trial.state.source, trial.findings, frozenset(others)
    return frozenset(
        name
        for name in findings.readable.intersection(names)
        if not holds_bits(
            findings.placements[name], source.other(name) if name in changed else source.bits(name)
        )
    )


def decide_remaining(findings: Findings) -> Findings:
    left: dict[str, TensorClass] = {
        name: "in_place" if found else "absent"
        for name, found in findings.placements.items()
        if name not in findings.classes
    }
    return replace(findings, classes={**findings.classes, **left})
