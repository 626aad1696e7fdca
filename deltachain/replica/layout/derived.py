"""Live tensors that come from no checkpoint tensor: constants of the engine, or made from others.

Which of the two is found by what they hold after another checkpoint was loaded, post-load
processing included. What a derived tensor is made from is found in the same way, one tensor at a
time, from its own module outwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Final

from deltachain.errors import EngineVersionError, TensorMismatchError
from deltachain.replica.layout.components import components
from deltachain.replica.layout.findings import Findings
from deltachain.replica.layout.holders import Holders
from deltachain.replica.layout.links import Links, all_layers, links_of
from deltachain.replica.layout.members import digest_of
from deltachain.replica.layout.other_bits import mixed
from deltachain.replica.layout.source import LoadedCheckpoint
from deltachain.replica.layout.state import ModelState, layer_of
from deltachain.replica.layout.ways import RELOADS, Way, bring

NEAR: Final = 512
"""Tensors of one scope that are tried one by one."""


def find_derived(state: ModelState, source: LoadedCheckpoint, findings: Findings) -> Findings:
    """Tell constants from derived tensors; what those are made from must be reloaded.

    Raises:
        TensorMismatchError: A live tensor follows the checkpoint, and it cannot be found out which
            tensors; or it cannot be tried.
    """
    search = _Search(state, source, findings)
    left = search.uncovered | search.left_behind()
    if not left:
        return findings
    derived = search.affected(source.present) & left
    if derived:
        search.ignore_unstable()
        derived = search.affected(source.present) & left
    search.expect_made(left - derived)
    search.expect_stable(left - derived)
    search.expect_loaded(left - derived)
    return _with_derived(state, findings, _made_from(search, derived))


def _with_derived(state: ModelState, findings: Findings, made: Mapping[str, set[str]]) -> Findings:
    """Note what live tensors are made from: their modules must follow that too."""
    layers, derived = dict(findings.loaded_into), dict(findings.derived)
    reasons: dict[str, str] = {}
    for live, names in made.items():
        for name in names:
            layers[name] = layers.get(name, frozenset()) | {_module(state, live)}
            if not live.endswith("()"):
                derived[name] = derived.get(name, frozenset()) | {live}
            reasons.setdefault(name, f"the engine derives {live} from it")
    return replace(findings.only_reloaded(reasons), loaded_into=layers, derived=derived)


def _made_from(search: _Search, derived: frozenset[str]) -> Mapping[str, set[str]]:
    """The checkpoint tensors that each derived one is made from."""
    made: dict[str, set[str]] = {live: set() for live in derived}
    for scopes in _outwards(search, derived):
        wanted = [scopes[live] for live in scopes if not made[live]]
        for picked in zip_longest(*wanted):
            tried = {name for name in picked if name is not None}
            for live in search.affected(tried) & scopes.keys():
                made[live] |= tried.intersection(scopes[live])
    others = set(search.source.present).difference(*made.values())
    missed = [live for live in derived if not made[live]]
    if derived and not missed:
        missed += sorted(search.affected(others, whole=True) & derived)
    for live in missed:
        raise TensorMismatchError(
            f"the engine's {live} follows the checkpoint, it is not known which tensors of it",
            tensor=live,
        )
    return made


class _Search:
    """What follows when the engine loads other bits of some tensors, in any way it has."""

    def __init__(self, state: ModelState, source: LoadedCheckpoint, findings: Findings) -> None:
        self.state, self.source, self.findings = state, source, findings
        self.all_links = links_of(state, source, findings, source.specs)
        self.links = {name: self.all_links[name] for name in source.present}
        self.groups = components(self.links, self.links, findings.joined)
        self.unstable: dict[Way, frozenset[str]] = {}
        self.missing: set[Way] = set()
        self.ignoring = False
        self.made_anew: frozenset[str] = frozenset()
        self.beyond = _beyond(state, self.all_links)
        self.uncovered = _uncovered(state, findings, self.all_links)

    def ignore_unstable(self) -> None:
        """From now on, ignore what changes also when the engine loads the same bits again."""
        self.ignoring = True
        for way in (*RELOADS, "loaded"):
            found = self._load(way, self.groups, frozenset())
            if found is not None:
                self.unstable[way] = found

    def expect_stable(self, constants: frozenset[str]) -> None:
        """Refuse what seems to follow nothing because no load leaves it as it was.

        Raises:
            TensorMismatchError: It changes in every way, also when the same bits are loaded again.
        """
        ways = iter(self.unstable.values())
        for live in sorted(constants.intersection(next(ways, frozenset()), *ways)):
            raise TensorMismatchError(
                f"the engine's {live} comes from no tensor of the chain, and changes whenever the "
                "engine loads the same again"
            )

    def expect_loaded(self, constants: frozenset[str]) -> None:
        """Refuse what a layer with weights made when it ran: no load makes that again.

        Raises:
            TensorMismatchError: One did.
        """
        linked = frozenset().union(*self.links.values())
        linked |= {layer.rpartition(".")[0] for layer in linked}
        for live in sorted(constants & self.state.model.made_by_running()):
            if _module(self.state, live) in linked:
                raise TensorMismatchError(
                    f"the engine made {live} when it ran, beside weights that it may be made of; "
                    "it does not make it again when they change"
                )

    def left_behind(self) -> frozenset[str]:
        """Live tensors that stay as they are when layers are reloaded, and not when repacked.

        One may be in a module that other tensors are loaded into: that these change it proves
        nothing of this one.
        """
        broken = self.findings.reload_only
        groups = [group for group in self.groups if not broken.isdisjoint(group)]
        found = self._left_behind(groups)
        if found is None and "repacked" not in self.missing:
            apart = [self._left_behind([group]) or frozenset() for group in groups]
            found = frozenset().union(*apart)
        return found or frozenset()

    def _left_behind(self, groups: list[list[str]]) -> frozenset[str] | None:
        """The same for some groups; ``None`` where they cannot be loaded in both ways."""
        names = frozenset(name for group in groups for name in group)
        repacked = self._load("repacked", groups, names) if names else frozenset()
        reloaded = self._load("reloaded", groups, names) if repacked else frozenset()
        return None if repacked is None or reloaded is None else repacked - reloaded

    def affected(self, names: Iterable[str], *, whole: bool = False) -> frozenset[str]:
        """Live tensors and outputs that change; afterwards all is as it was.

        Args:
            names: Of the tensors that hold other bits.
            whole: Load everything, not only these and what is loaded with them: something may be
                made from a layer beside the one that makes it.

        Raises:
            TensorMismatchError: The engine loads in none of its ways.
        """
        changed = frozenset(names)
        groups = [group for group in self.groups if whole or not changed.isdisjoint(group)]
        if not changed or not groups:
            return frozenset()
        packing = [self._follow(way, groups, changed) for way in RELOADS]
        seen = [found for found in packing if found is not None]
        plain = self._follow("loaded", groups, changed)
        untried = self.uncovered if plain is None else self._packed()
        if untried and not seen:
            raise TensorMismatchError(
                f"the engine's {min(untried)} comes from no tensor of the chain, "
                "and it cannot be tried whether it is a constant: loading again fails"
            )
        return frozenset().union(*seen, plain or ())

    def _follow(
        self, way: Way, groups: list[list[str]], changed: frozenset[str]
    ) -> frozenset[str] | None:
        """What changes in one way of loading, without what it changes in any case."""
        found = self._load(way, groups, changed)
        if found and self.ignoring and way not in self.unstable:  # not everything can be loaded so
            found -= self._load(way, groups, frozenset()) or frozenset()
        return found

    def expect_made(self, constants: frozenset[str]) -> None:
        """Refuse what is the same only because no load was seen to make it again.

        Args:
            constants: What no load changed.

        Raises:
            TensorMismatchError: A layer that tensors are loaded into, or that computes from what
                cannot be seen, was not processed again in any load.
        """
        linked = frozenset().union(*self.links.values()) | self.beyond
        doubtful = (linked & self.state.processed) - self.made_anew
        doubts = sorted(live for live in constants if _module(self.state, live) in doubtful)
        layers = self._processed() if doubts else frozenset()
        for live in doubts:
            if _module(self.state, live) not in layers:
                raise TensorMismatchError(
                    f"the engine's {live} comes from no tensor of the chain, and it cannot be "
                    "tried whether it is a constant: no load makes it again"
                )

    def _processed(self) -> frozenset[str]:
        """Layers that a reload changes otherwise than a load alone does.

        That it leaves them as they were shows nothing: it may do nothing at all.
        """
        loaded, reloaded = self._left_by("loaded"), self._left_by("reloaded")
        return frozenset(
            self.state.owner[name]
            for name, digest in reloaded.items()
            if loaded.get(name) != digest
        )

    def _left_by(self, way: Way) -> Mapping[str, bytes]:
        """Digests of what live tensors hold when all is loaded with other bits, where that changed.

        None where the engine cannot.
        """
        state, source = self.state, self.source
        load = partial(bring, state.model, way, frozenset())
        try:
            load(mixed(source.clones, source.present, source.present))
            changed = state.changed() & state.tensors.keys()
            return {name: digest_of(state.tensors[name]) for name in changed}
        except Exception:  # noqa: BLE001 - an engine may raise anything
            return {}
        finally:
            state.put_back(partial(load, source.clones(source.present)))

    def _packed(self) -> frozenset[str]:
        """What no known way leads to, in layers that a load alone does not make anew."""
        processed = self.state.model.processed()
        return frozenset(n for n in self.uncovered if _module(self.state, n) in processed)

    def _load(
        self, way: Way, groups: list[list[str]], changed: frozenset[str]
    ) -> frozenset[str] | None:
        state, source = self.state, self.source
        names = [name for group in groups for name in group]
        layers = self.state.holders.tied(all_layers(self.links, names))
        if way == "repacked":
            layers |= self.beyond
        try:
            bring(state.model, way, layers, mixed(source.clones, names, changed))
            outputs = state.follows(frozenset(state.outputs))
            found = state.changed()
            self.made_anew |= layers if way == "repacked" else frozenset()
            found |= {f"{layer}()" for layer in outputs & state.outputs.keys()}
            return found - self.unstable.get(way, frozenset())
        except EngineVersionError:
            self.missing.add(way)
            return None
        except Exception:  # noqa: BLE001 - an engine may raise anything
            return None
        finally:
            state.put_back(partial(bring, state.model, way, layers, source.clones(names)))


def _beyond(state: ModelState, links: Links) -> frozenset[str]:
    """Processed layers that compute something, and that no tensor is known to be loaded into."""
    return (frozenset(state.outputs) & state.processed) - all_layers(links, links)


def _uncovered(state: ModelState, findings: Findings, links: Links) -> frozenset[str]:
    """Live tensors and outputs that no known way leads to."""
    filled = state.holders.tied(all_layers(links, findings.reload_only))
    holders = Holders(state.tensors.items())
    places = [place for name in findings.in_place() for place in findings.placements[name]]
    covered = frozenset().union(*(holders.of(place.live) for place in places))
    reached = filled | all_layers(links, links)
    live = frozenset(
        name for name in state.tensors if name not in covered and state.owner[name] not in filled
    )
    numbers = {name for name in state.numbers if layer_of(name, state.modules) not in filled}
    outputs = {f"{layer}()" for layer in state.outputs.keys() - reached}
    return (live | numbers | outputs) - findings.touched


def _outwards(search: _Search, derived: frozenset[str]) -> Iterator[Mapping[str, list[str]]]:
    """Checkpoint tensors that may be what derived ones are made from, the nearest first."""
    scope = {live: _module(search.state, live) for live in derived}
    tried: dict[str, set[str]] = {live: set() for live in derived}
    while scope:
        found: dict[str, list[str]] = {}
        for live, prefix in scope.items():
            inside = [
                name
                for name in search.source.specs
                if name not in tried[live]
                and (not prefix or any(_is_in(layer, prefix) for layer in search.all_links[name]))
            ]
            tried[live].update(inside)
            if inside and len(inside) <= NEAR:
                found[live] = inside
        yield found
        scope = {live: prefix.rpartition(".")[0] for live, prefix in scope.items() if prefix}


def _module(state: ModelState, live: str) -> str:
    """The module that a live tensor, a number or an output is of."""
    if live.endswith("()"):
        return live.removesuffix("()")
    return layer_of(live, state.modules)


def _is_in(layer: str, prefix: str) -> bool:
    return not prefix or layer == prefix or layer.startswith(f"{prefix}.")
