"""Whether what an engine holds and computes follows each tensor alone.

Loading what is loaded already must change no bit. For every tensor by itself, loading other bits of
it must change what each of its layers holds or computes, and loading the first bits again must lead
back, bit for bit. A loader that quietly does nothing, or does it for the neighbours only, passes
none of that.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest

from deltachain.errors import EngineVersionError, TensorMismatchError
from deltachain.replica.layout.members import SavedBits
from deltachain.replica.layout.other_bits import WeightsFactory, mixed
from deltachain.replica.layout.rest import Rest
from deltachain.replica.layout.state import ModelState
from deltachain.replica.layout.ways import Group, Way, bring


@dataclass(frozen=True, slots=True)
class Outcome:
    """What trying a way showed.

    Attributes:
        touched: Live tensors that other bits of some tensor changed.
        refused: Why groups cannot be loaded so, by their first tensor; empty where the engine has
            no such way.
        idle: Tensors of the other groups that nothing followed.
        beside: Tensors of these that a layer holds, and that what it computes does not follow.
        moved: Tensors that do not lie where they were recorded when others are loaded beside them.
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
    """One way of loading, tried on groups of tensors.

    Attributes:
        state: Of the model, which holds it again afterwards.
        way: That is tried.
        weights: Of the checkpoint that the model holds.
        links: The layers that must follow each tensor.
        rest: What has a way and is not loaded.
        made: Live tensors and numbers that must follow each tensor.
        vectors: Tensors of one dimension or none.
        visible: Tensors that live in the model bit by bit.
        shared: Those of them that others may be loaded over.
        moved: Of some tensors, those that are not in their places, where some of them, which are
            given as well, were loaded with other bits.
    """

    state: ModelState
    way: Way
    weights: WeightsFactory
    links: Mapping[str, frozenset[str]]
    rest: Rest
    made: Mapping[str, frozenset[str]] = field(default_factory=dict)
    vectors: Container[str] = ()
    visible: Container[str] = ()
    shared: Container[str] = ()
    moved: Callable[[Iterable[str], Container[str]], frozenset[str]] = lambda *_: frozenset()

    def run(self, groups: Sequence[Group]) -> Outcome:
        """Try groups at once that have no layer in common; all alone where something goes wrong."""
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

    def _apart(self, groups: Sequence[Group], touched: frozenset[str]) -> Outcome:
        """Refuse groups that cannot be loaded beside everything else, or beside each other."""
        try:
            return Outcome(moved=self._expect_apart(groups, touched))
        except Exception:  # noqa: BLE001 - an engine's loader may raise anything; who, is found now
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
    def _refusing(self, groups: Sequence[Group], outcomes: list[Outcome]) -> Iterator[None]:
        """Have the model hold what it held where something is raised, and note why."""
        try:
            yield
        except Exception as exc:  # noqa: BLE001 - an engine's loader may raise anything
            self._put_back(groups)
            told = exc.args[0] if isinstance(exc, TensorMismatchError) else repr(exc)
            has_way = not isinstance(exc, EngineVersionError)
            why = f"loading it again fails: {told}"[:200] if has_way else ""
            outcomes.append(Outcome({group.names[0]: why for group in groups}))

    def _put_back(self, groups: Sequence[Group]) -> None:
        """Have the model hold what it held; its own loading may reach what cannot be seen."""
        self.state.put_back(partial(self._load, groups, {}))

    def _try(self, groups: Sequence[Group]) -> Outcome:
        """Try groups of known layers together, or a single one; raises where it is not exact."""
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

    def _expect_repeatable(self, groups: Sequence[Group]) -> frozenset[str]:
        """Refuse a loader that does another thing with the same bits the next time.

        Returns:
            Tensors that are not in their places then.

        Raises:
            TensorMismatchError: It does.
            Exception: Whatever it raises.
        """
        others = {name: group for group in groups for name in group.names}
        self._load(groups, others)
        once = ModelState(self.state.model, SavedBits(self.state.model.tensors()))
        self._load(groups, others)
        once.expect_same()
        moved = self.moved(others, others)
        self._load(groups, {})
        self.state.expect_same()
        return moved

    def _expect_apart(self, groups: Sequence[Group], touched: frozenset[str]) -> frozenset[str]:
        """Refuse a loader that changes tensors beside the given ones, while all hold other bits.

        A swap loads the groups that changed, so each must be taken without each other one: they are
        told apart by the digits of their numbers.

        Args:
            groups: Each of which can be loaded alone.
            touched: Live tensors that this was seen to change: some are made in other layers.

        Returns:
            Tensors that were loaded and are not in their places.

        Raises:
            TensorMismatchError: It does.
            Exception: Whatever it raises.
        """
        if not groups:
            return frozenset()
        others = {name: group for group in groups for name in group.names}
        self._expect_kept(groups, others, touched)
        once = ModelState(self.state.model, SavedBits(self.state.model.tensors()))
        moved = self.moved(others, others)
        for half in halves(groups):
            self._load(half, others)
            once.expect_same()
        self.rest.write(other=False)
        self._load(groups, {})
        self.state.expect_same()
        return moved

    def _expect_kept(
        self, groups: Sequence[Group], others: Mapping[str, Group], touched: frozenset[str]
    ) -> None:
        """Load groups with other bits beside other bits of everything else, which must stay."""
        self.rest.write(other=True)
        follow = {self.state.owner[name] for name in touched if name in self.state.owner}
        mine = follow.union(*(group.layers for group in groups))
        beside = frozenset(self.state.modules) - mine if all(g.layers for g in groups) else None
        before = ModelState(
            self.state.model, SavedBits(self.state.model.tensors()), beside or frozenset()
        )
        self._load(groups, others)
        if beside:
            before.expect_same(beside)
        for name in sorted(self.rest.lost()):
            raise TensorMismatchError(f"it overwrites {name}", tensor=name)

    def _load(self, groups: Iterable[Group], others: Mapping[str, Group]) -> None:
        """Load groups, with other bits for some tensors."""
        groups = list(groups)
        names = [name for group in groups for name in group.names]
        layers = frozenset().union(*(group.layers for group in groups))
        if not all(group.layers for group in groups):
            layers = frozenset()
        bring(self.state.model, self.way, layers, mixed(self.weights, names, others))


class _Seen:
    """What loading other bits of each tensor alone did.

    Args:
        trial: That loads them.
        groups: The first tensor of each group.
    """

    def __init__(self, trial: Trial, groups: frozenset[str]) -> None:
        self.trial, self.state = trial, trial.state
        self.left = set(groups)
        self.touched: set[str] = set()
        self.idle: set[str] = set()
        self.moved: set[str] = set()
        self.beside: dict[str, tuple[Group, frozenset[str]]] = {}
        self.followed: dict[Group, frozenset[str]] = {}

    def look(self, picked: Mapping[str, Group]) -> None:
        """Judge tensors of which others were loaded, one of each group.

        Raises:
            TensorMismatchError: Something did not follow one of them.
        """
        changed = self.state.changed()
        self.touched |= changed
        for name, group in picked.items():
            if name not in self.trial.visible:  # others may lie where nobody saw it put
                self.moved |= self.trial.moved(group.names, picked)
            why = self._judge(name, group, changed)
            if why:
                raise TensorMismatchError(why, tensor=name)
        self._expect_followed(picked, changed)

    def _expect_followed(self, picked: Mapping[str, Group], changed: frozenset[str]) -> None:
        """Refuse loads that change what a layer holds, beside these, and not what it computes.

        Raises:
            TensorMismatchError: One does.
        """
        state = self.state
        mine = frozenset().union(*(group.layers for group in picked.values()))
        beside = {state.owner[name] for name in changed if name in state.owner} - mine
        beside &= state.outputs.keys() & state.processed
        if not mine or not beside:
            return
        for layer in sorted(beside - state.follows(frozenset(beside))):
            raise TensorMismatchError(f"{layer} does not follow {min(picked)}", tensor=min(picked))

    def _judge(self, name: str, group: Group, changed: frozenset[str]) -> str:
        """What did not follow a tensor, in words.

        A tensor that nothing follows stays a member of its group: it may act only beside others,
        or be overwritten by one of them. A loader alone has nothing that it could act on.
        """
        state, trial = self.state, self.trial
        layers = group.layers or frozenset(state.modules)
        live = {n for n in changed if n in state.owner and state.owner[n] in layers}
        holding = frozenset().union(*(state.holders.of(state.tensors[n]) for n in live))
        links = trial.links.get(name, frozenset())
        found = state.follows(layers | holding | links)
        if not found & layers and not live:
            self.idle.add(name)
            must = name in trial.visible or trial.way == "loaded"
            return f"nothing follows {name}" if must and name not in trial.shared else ""
        left = trial.made.get(name, frozenset()) - changed
        if left:
            return f"{min(left)} does not follow {name}"
        self.left.discard(group.names[0])
        self.followed[group] = self.followed.get(group, frozenset()) | (found & layers)
        missing = (links | holding) - found
        if missing:
            holders = [state.holders.of(state.tensors[n]) for n in live]
            alone, shared = (
                frozenset().union(*(one for one in holders if (len(one) == 1) is single))
                for single in (True, False)
            )
            if not missing <= alone - shared or name not in trial.vectors:
                return f"{min(missing)} does not follow {name}"
            self.beside[name] = group, missing
        return ""

    def outcome(self, moved: frozenset[str]) -> Outcome:
        """What was seen of all.

        A vector that a layer holds and does not compute from says nothing of how it was loaded; the
        matrix beside it does.

        Raises:
            TensorMismatchError: Nothing shows that a layer was made anew.
        """
        for name, (group, layers) in self.beside.items():
            left = layers - self.followed.get(group, frozenset())
            if left:
                raise TensorMismatchError(f"{min(left)} does not follow {name}", tensor=name)
        refused = {first: f"nothing follows {first}" for first in self.left}
        touched, idle = frozenset(self.touched), frozenset(self.idle)
        return Outcome(refused, touched, idle, frozenset(self.beside), moved.union(self.moved))


def _without_common_layers(groups: Sequence[Group]) -> list[list[Group]]:
    """Groups by turns: of two in one layer, either would follow the other's change."""
    turns: list[list[Group]] = []
    taken: list[set[str]] = []
    for group in groups:
        turn = next((n for n, one in enumerate(taken) if one.isdisjoint(group.layers)), len(turns))
        if turn == len(turns):
            turns.append([])
            taken.append(set())
        turns[turn].append(group)
        taken[turn] |= group.layers
    return turns


def halves(groups: Sequence[Group]) -> Iterator[list[Group]]:
    """Some of the groups at a time, so that any two are apart once; none where there is one."""
    for digit in range((len(groups) - 1).bit_length()):
        for value in (0, 1):
            yield [one for at, one in enumerate(groups) if (at >> digit) & 1 == value]
