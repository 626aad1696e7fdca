"""What is known of the ways into one rank's live weights while they are being found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from deltachain.errors import TensorMismatchError
from deltachain.replica.engine import EngineModel
from deltachain.replica.layout.components import components, distinct
from deltachain.replica.layout.hiding import may_hide
from deltachain.replica.layout.members import Members, restoring
from deltachain.replica.layout.recorder import Recording
from deltachain.replica.layout.rest import Rest, lies
from deltachain.replica.layout.source import LoadedCheckpoint
from deltachain.replica.layout.state import ModelState
from deltachain.replica.layout.trial import Outcome, Trial
from deltachain.replica.layout.update_path import ORDER, TensorClass
from deltachain.replica.layout.ways import RELOADS, Group, Way, bring, modules_in
from deltachain.replica.windows import Placement
from deltachain.subscribe.targets.patch import varied
from deltachain.torch_names import WIRE_NAMES


class Finding:
    """What is known so far of every tensor, and what is tried to learn more.

    Args:
        model: The engine's.
        source: The checkpoint that it loaded.
        recording: What its loader was seen to do.
        state: What it holds and computes.

    Attributes:
        places: Where each tensor lives, as recorded.
        reasons: Why tensors are not in place.
        broken: Those that only a reload of their layers may bring.
        layers: Those that each tensor is loaded into, and those derived from it.
        classes: Of the tensors that are done.
        groups: Those that the engine loads, with their way.
        touched: Live tensors that loading some of them was seen to change.
    """

    def __init__(
        self, model: EngineModel, source: LoadedCheckpoint, recording: Recording, state: ModelState
    ) -> None:
        self.model, self.source, self.state = model, source, state
        self.places: dict[str, list[Placement]] = {name: [] for name in source.specs}
        self.reasons: dict[str, str] = {}
        self.broken: set[str] = set()
        self.shared: set[str] = set()
        self.alike: set[str] = set()
        self.hidden: set[str] = set()
        self.read: set[str] = set()
        self.needs: dict[str, TensorClass] = {}
        self.classes: dict[str, TensorClass] = {}
        self.groups: list[tuple[Way, Group]] = []
        self.touched: frozenset[str] = frozenset()
        owner = source.owner
        for here, places in recording.places.items():
            self.places[owner[here]] += places
        for here, reason in recording.reasons.items():
            self.reasons.setdefault(owner[here], reason)
        self.broken.update(owner[here] for here in recording.raised)
        self.together = [frozenset(owner[here] for here in one) for one in recording.together]
        self.holders = state.holders
        self.made: dict[str, frozenset[str]] = {}
        self.flat = frozenset(n for n in source.present if not varied(source.bits(n)))
        self.layers = self._layers()

    def require(self, classes: Mapping[str, TensorClass]) -> None:
        """Give tensors no better class than they have on other ranks."""
        for name, kind in classes.items():
            self.needs[name] = kind
            if kind in RELOADS:
                self.break_(name, f"it is {kind} on another rank")
            elif kind == "loaded":
                self.reasons.setdefault(name, "it is loaded on another rank")

    def break_(self, name: str, reason: str) -> None:
        """Say that nothing short of a reload brings a tensor, and why."""
        self.reasons.setdefault(name, reason)
        self.broken.add(name)

    def in_place(self) -> list[str]:
        """Tensors that nothing speaks against writing in place, so far."""
        names = self.source.specs
        return [name for name in names if self.places[name] and name not in self.reasons]

    def read_back(self) -> None:
        """Compare live bits with the checkpoint's: a post-processed parameter cannot be written.

        A place that a tied name has as well is written once.
        """
        sharing: dict[int, list[tuple[str, Placement]]] = defaultdict(list)
        for name, spec in self.source.specs.items():
            self.places[name] = distinct(self.places[name])
            self.read.update([name] if self.places[name] else [])
            for place in self.places[name]:
                dtype = WIRE_NAMES.get(place.live.dtype)
                if dtype != spec.dtype:
                    self.read.discard(name)
                    self.reasons.setdefault(name, f"the engine serves it as {dtype}")
                elif not lies([place], self.source.bits(name)):
                    self.read.discard(name)
                    self.break_(name, "the engine changed its bits after loading")
                sharing[_storage(place.live)].append((name, place))
        for shared in sharing.values():
            self._refuse_shared(shared)
        for name, layers in self.layers.items():
            found = self.places[name] or name in self.reasons
            if layers and not found and self.source.specs[name].numel:
                self.break_(name, f"{min(layers)} does not keep it as it was loaded")

    def _refuse_shared(self, shared: list[tuple[str, Placement]]) -> None:
        """Two tensors at one place would overwrite one another."""
        if len(shared) == 1:
            return
        live = shared[0][1].live
        size = live.untyped_storage().nbytes() // live.element_size()
        taken = torch.zeros(size, dtype=torch.bool)
        for name, place in shared:
            mine = taken.as_strided(place.live.shape, place.live.stride(), place.at)
            if bool(mine.any()):
                self.shared.add(name)
                self.break_(name, "it shares live elements with another tensor")
            mine.fill_(True)

    def find_hidden(self) -> None:
        """Find layers that cannot be tried and may compute from what cannot be read.

        Those that are processed after loading may: where they keep what nobody can look into, or
        where that shows when they are processed once more.

        Raises:
            TensorMismatchError: One keeps what nobody can look into. Nothing is loaded then, since
                nobody could see that it was put back.
        """
        links = {name: self.links(name) for name in self.source.present}
        layers = frozenset().union(*links.values()) & self.state.processed
        doubtful = layers - self.state.outputs.keys()
        if not doubtful:
            return
        for layer in sorted(doubtful & self.state.opaque):
            name = min(name for name in links if layer in links[name])
            raise TensorMismatchError(
                f"{layer} keeps what it computes from where it can be neither seen nor tried: "
                f"{name!r} cannot be written",
                tensor=name,
                hint="set linear and MoE backends that keep weights in tensors",
            )
        names = [name for name in links if links[name] & doubtful]
        scope = self.tied(frozenset().union(*(links[name] for name in names)))
        shown: set[str] = set()
        for way in RELOADS:
            members = {layer: Members(modules_in(self.model, {layer})) for layer in doubtful}
            with suppress(Exception):
                bring(self.model, way, scope, self.source.clones(names))
                shown |= doubtful
                self.hidden |= {
                    n for n, one in members.items() if any(map(may_hide, one.replaced()))
                }
            self.state.put_back()
        self.hidden |= doubtful - shown
        for name in names:
            for layer in sorted(links[name] & self.hidden):
                self.break_(name, f"what {layer} computes from cannot be seen")

    def links(self, name: str) -> frozenset[str]:
        """The layers that must follow a tensor: those it is loaded into or shares memory with."""
        found = self.layers.get(name, frozenset())
        for place in self.places[name]:
            found |= self.holders.of(place.live)
        return found if self.places[name] else self._with_twins(name, found)

    def _with_twins(self, name: str, layers: frozenset[str]) -> frozenset[str]:
        """Layers, and those that have the only tensor of one of them in common with it.

        A vector beside what a tensor is packed into, such as a bias, is not that tensor.
        """
        found, shape = set(layers), self.source.specs[name].shape
        for layer in layers:
            held = [t for n, t in self.state.tensors.items() if self.state.owner[n] == layer]
            if len(held) == 1 and (len(shape) < 2 or held[0].numel() > max(shape)):
                found |= self.holders.of(held[0])
        return frozenset(found)

    def tied(self, layers: frozenset[str]) -> frozenset[str]:
        """Layers, and those that have a live tensor in common with one of them."""
        return self.holders.tied(layers)

    def _layers(self) -> dict[str, frozenset[str]]:
        found: dict[str, frozenset[str]] = defaultdict(frozenset)
        with restoring(self.model.modules().values()) as members:
            layers = self.model.layers(self.source.meta())
            members.put_back()
        for here, into in layers.items():
            found[self.source.owner[here]] |= into
        return dict(found)

    def try_loading(self) -> None:
        """Let the engine's loader load what was computed or cast, as often as it changes."""
        doubtful = [name for name in self.reasons if name not in self.broken]
        links = {name: self.links(name) for name in doubtful}
        for together in (components(doubtful, links, self.together), self._alone(doubtful)):
            left = [names for names in together if not self.classes.keys() & set(names)]
            self._try("loaded", [self._group(names) for names in left])
        self.broken.update(name for name in doubtful if name not in self.classes)

    def _alone(self, names: Sequence[str]) -> list[list[str]]:
        return components(names, {name: frozenset() for name in names}, self.together)

    def try_reloading(self) -> None:
        """Reload the layers of what is left, whole."""
        links = {name: self.links(name) for name in self.source.specs}
        touched = frozenset().union(*(links[name] for name in self.broken))
        names = [n for n in links if n in self.broken or links[n] & touched]
        groups = [self._group(one) for one in self._grown(names, links)]
        groups = [group for group in groups if not self.broken.isdisjoint(group.names)]
        for group in groups:
            for name in group.names:  # a layer is reloaded whole
                self.classes.pop(name, None)
        self.groups = [one for one in self.groups if not self._covered(one[1], groups)]
        why: dict[str, str] = {}
        for way in RELOADS:
            left = [g for g in groups if g.names[0] not in self.classes and self._may(way, g, why)]
            for name, reason in self._try(way, left).items():
                why[name] = reason or why.get(name, "the engine gives no way to load it again")
        for group in groups:
            for name in group.names:
                reason = self.reasons.setdefault(name, "its layer is packed")
                if name not in self.classes:
                    self.classes[name] = "refused"
                    self.reasons[name] = f"{reason}; {why.get(group.names[0], 'no way is proven')}"

    def _grown(self, names: list[str], links: Mapping[str, frozenset[str]]) -> list[list[str]]:
        """Groups that have every tensor of each of their layers."""
        while True:
            known = frozenset(names).union(*(o for o in self.together if not o.isdisjoint(names)))
            layers = frozenset().union(*(links[name] for name in known))
            more = [n for n in self.source.specs if n in known or links[n] & layers]
            if len(more) == len(names):
                return components(more, links, self.together)
            names = more

    def _covered(self, group: Group, others: Iterable[Group]) -> bool:
        return any(not set(group.names).isdisjoint(other.names) for other in others)

    def _may(self, way: Way, group: Group, why: dict[str, str]) -> bool:
        if not self.shared.isdisjoint(group.names):
            why[group.names[0]] = "the one that is loaded last would win"
        elif not self.alike.isdisjoint(group.names):
            why[group.names[0]] = "nor would loading them again"
        elif group.layers & self.hidden:
            why[group.names[0]] = "nor can it be tried"
        elif not group.layers:
            why[group.names[0]] = "no layer of it is known"
        else:
            return all(ORDER[self.needs.get(name, way)] <= ORDER[way] for name in group.names)
        return False

    def _try(self, way: Way, groups: Sequence[Group]) -> Mapping[str, str]:
        """Try a way; what it proves is done. Why it refuses some groups, by their first tensor.

        Groups that cannot be loaded each by itself may be loaded together.
        """
        refused = self._try_each(way, groups)
        left = [group for group in groups if group.names[0] in refused]
        if len(left) > 1 and any(refused.values()):
            names = {name for group in left for name in group.names}
            whole = self._group([name for name in self.source.specs if name in names])
            again = self._try_each(way, [whole])
            if not again:
                self.together.append(frozenset(names))
            refused = again and refused
        return refused

    def _try_each(self, way: Way, groups: Sequence[Group]) -> Mapping[str, str]:
        outcome = self._trial(way, groups)
        refused = dict(outcome.refused)
        self.touched |= outcome.touched if way == "loaded" else frozenset()
        for group in groups:
            first = group.names[0]
            silent = self._silent(outcome, group)
            blank = [n for n in outcome.idle & silent & self.flat if self.source.specs[n].numel > 1]
            if first not in refused and blank:
                refused[first] = f"nothing follows {min(blank)}, which is all alike"
            stray = outcome.moved.intersection(group.names) - self.flat - self.shared
            if first not in refused and stray:  # it lay there bit by bit, which was no chance
                refused[first] = f"other bits of {min(stray)} do not arrive at its place"
            if first not in refused and silent and way == "reloaded":
                refused |= self._confirm(group, silent)
            if first not in refused:
                self.read -= outcome.moved.intersection(group.names)
                self.classes.update(dict.fromkeys(group.names, way))
                self.groups.append((way, group))
        return refused

    def _silent(self, outcome: Outcome, group: Group) -> frozenset[str]:
        """Tensors of a group that what is computed does not follow."""
        return (outcome.idle | outcome.beside).intersection(group.names) - self.shared

    def _confirm(self, group: Group, silent: frozenset[str]) -> Mapping[str, str]:
        """Why a reload may have left out what nothing followed: from nothing, something does."""
        again = self._trial("repacked", [group])
        if again.refused or self._silent(again, group) != silent:
            return {group.names[0]: f"nothing follows {min(silent)}"}
        return {}

    def _trial(self, way: Way, groups: Sequence[Group]) -> Outcome:
        links = {name: self.links(name) for group in groups for name in group.names}
        trial = Trial(
            state=self.state,
            way=way,
            weights=self.source.clones,
            links=links,
            made=self.made,
            vectors={name for name in links if len(self.source.specs[name].shape) < 2},
            visible={name for name, places in self.places.items() if places},
            shared=self.shared,
            moved=self._moved,
            rest=self._rest(links),
        )
        return trial.run(groups)

    def _moved(self, names: Iterable[str], others: Container[str]) -> frozenset[str]:
        """Of some tensors, of which others hold other bits, those that are not in their places."""
        source = self.source
        return frozenset(
            name
            for name in self.read.intersection(names)
            if not lies(
                self.places[name], source.other(name) if name in others else source.bits(name)
            )
        )

    def _rest(self, loaded: Container[str]) -> Rest:
        """What is known to have a way, beside some tensors."""
        return Rest(
            self.model,
            self.source,
            {name: self.places[name] for name in self.in_place() if name not in loaded},
            [one for one in self.groups if not any(name in loaded for name in one[1].names)],
        )

    def _group(self, names: Sequence[str]) -> Group:
        links = [self.links(name) for name in names]
        layers = self.tied(frozenset().union(*links)) if all(links) else frozenset()
        return Group(tuple(names), layers)

    def conclude(self) -> None:
        """Give everything that is left its class."""
        for name in self.source.specs:
            if name not in self.classes:
                self.classes[name] = "in_place" if self.places[name] else "absent"


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
