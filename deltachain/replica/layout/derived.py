"""Live tensors that no checkpoint tensor is loaded into, and checkpoint tensors that nothing uses.

Loading other bits, post-load processing included, changes derived tensors, but not constants. The
sources of a derived tensor are found in the same way, one checkpoint tensor at a time, from its own
module outwards.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from deltachain.errors import EngineVersionError, TensorMismatchError

from .findings import Findings, Links, all_layers, components, links_of, some_of_each
from .model_state import (
    PART,
    RELOADS,
    TOGETHER,
    LoadGroup,
    LoadMethod,
    ModelState,
    batches,
    idle,
    layer_of,
    restore_outputs,
)
from .module_members import MemoryIndex, digest_of
from .reloads import try_reloading

if TYPE_CHECKING:
    from .discover import Layout

NEAR: Final = 512
"""Largest number of tensors of one scope to try one by one."""


def find_derived(state: ModelState, findings: Findings) -> Findings:
    """Distinguish constants from derived tensors; the sources of the latter must be reloaded.

    Refuses a live tensor that depends on unknown tensors, or cannot be tested.
    """
    search, present = _Search(state, findings), state.source.present
    left = search.uncovered | search.left_behind()
    if not left:
        return findings
    made = search.affected(present) & left
    if made:
        search.brief = False
        left = search.uncovered | search.left_behind()
        search.ignore_unstable()
        made = search.affected(present) & left
    search.expect_made(left - made)
    search.expect_stable(left - made)
    search.expect_loaded(left - made)
    layers, derived = dict(findings.loaded_into), dict(findings.derived)
    reasons: dict[str, str] = {}
    for live, names in _sources_of(search, made).items():
        for name in names:
            layers[name] = layers.get(name, frozenset()) | {_module(state, live)}
            if not live.endswith("()"):
                derived[name] = derived.get(name, frozenset()) | {live}
            reasons.setdefault(name, f"the engine derives {live} from it")
    return replace(findings.only_reloaded(reasons), loaded_into=layers, derived=derived)


def reload_at_once(state: ModelState, findings: Findings) -> Findings | None:
    """Try to reload all remaining layers after all were packed with other bits, as at the start.

    If reloads restore whatever that changed, they leave nothing behind, and nothing that no load
    restores is derived. ``None`` if anything else is found: then the search is thorough.
    """
    search, specs = _Search(state, findings), state.source.specs
    nbytes = sum(specs[name].nbytes for name in search.links)
    if findings.reload_only.isdisjoint(search.links) or findings.groups or nbytes > PART:
        return None
    try:
        findings = try_reloading(state, findings, search.pack)
    except Exception:  # noqa: BLE001 - an engine may raise anything
        state.put_back(partial(search._load_groups, "repacked", search.groups))
        return None
    search.expect_made(search.uncovered)
    search.expect_loaded(search.uncovered)
    return findings


def _sources_of(search: "_Search", derived: frozenset[str]) -> Mapping[str, set[str]]:
    made: dict[str, set[str]] = {live: set() for live in derived}
    for scopes in _outwards(search, derived):
        wanted = [scopes[live] for live in scopes if not made[live]]
        for picked in zip_longest(*wanted):
            tried = {name for name in picked if name is not None}
            for live in search.affected(tried) & scopes.keys():
                made[live] |= tried.intersection(scopes[live])
    others = set(search.state.source.present).difference(*made.values())
    missed = [live for live in derived if not made[live]]
    if derived and not missed:
        missed += sorted(search.affected(others, whole=True) & derived)
    for live in missed:
        raise TensorMismatchError(
            f"the engine's {live} depends on the checkpoint, but on which tensors is unknown",
            tensor=live,
        )
    return made


class _Search:
    """Search for live tensors that change when the engine loads other bits, by any method.

    ``uncovered`` live tensors and outputs come from no decided tensor; layers ``beyond`` have no
    loaded tensors, and are created again together with the others. A ``brief`` search reloads two
    groups of each kind, if all can be repacked: a later trial reloads each of them.
    """

    def __init__(self, state: ModelState, findings: Findings) -> None:
        self.state, self.findings = state, findings
        self.all_links = links_of(state, findings, state.source.specs)
        self.links = {name: self.all_links[name] for name in state.source.present}
        self.groups = components(self.links, self.links, findings.joined)
        self.brief = True
        self.unstable: dict[LoadMethod, frozenset[str]] = {}  # change if the same is loaded
        self.known: dict[object, frozenset[str] | None] = {}  # what loads changed
        self.missing: set[LoadMethod] = set()
        self.packing: tuple[LoadMethod, ...] = RELOADS if findings.reload_only else RELOADS[::-1]
        self.ignoring = False
        self.made_anew: frozenset[str] = frozenset()
        loaded = all_layers(self.all_links, self.all_links)
        self.beyond = (frozenset(state.outputs) & state.processed) - loaded
        self.uncovered = _uncovered(state, findings, self.all_links)

    def ignore_unstable(self) -> None:
        self.ignoring = True
        for method in (*RELOADS, "loaded"):
            found = self._load(method, self.groups, frozenset())
            if found is not None:
                self.unstable[method] = found

    def expect_stable(self, constants: frozenset[str]) -> None:
        """Refuse tensors that look constant only because every load changes them."""
        every = iter(self.unstable.values())
        for live in sorted(constants.intersection(next(every, frozenset()), *every)):
            raise TensorMismatchError(
                f"the engine's {live} is loaded from no tensor of the chain, and changes whenever "
                "the same weights are loaded again"
            )

    def expect_loaded(self, constants: frozenset[str]) -> None:
        """Refuse what a layer with weights computed at run time; loads do not update it."""
        linked = frozenset().union(*self.links.values())
        linked |= {layer.rpartition(".")[0] for layer in linked}
        for live in sorted(constants & self.state.model.made_by_running()):
            if _module(self.state, live) in linked:
                raise TensorMismatchError(
                    f"the engine computed {live} at run time, possibly from weights, and does not "
                    "compute it again when they change"
                )

    def left_behind(self) -> frozenset[str]:
        """Return live tensors of reloaded layers that a repack changes and a reload does not.

        Such a tensor may be in a module that other tensors are loaded into; this does not prove
        that it follows them.
        """
        broken = self.findings.reload_only
        if broken.isdisjoint(self.links):
            return frozenset()
        brief = self._is_brief(self.groups, frozenset(self.links))
        tried = self._some if brief else self.groups
        groups = [group for group in tried if not broken.isdisjoint(group)]
        found = self._left_behind(self.groups)
        if found is None and "repacked" not in self.missing:
            apart = [self._left_behind([group]) or frozenset() for group in groups]
            found = frozenset().union(*apart)
        layers = self._filled(groups)
        return frozenset(live for live in found or () if _module(self.state, live) in layers)

    def _left_behind(self, groups: list[list[str]]) -> frozenset[str] | None:
        names = frozenset(name for group in groups for name in group)
        repacked = self._load("repacked", groups, names)
        reloaded = self._load("reloaded", groups, names) if repacked else frozenset()
        return None if repacked is None or reloaded is None else repacked - reloaded

    def _filled(self, groups: list[list[str]]) -> frozenset[str]:
        names = [name for group in groups for name in group]
        return self.state.memory.tied(all_layers(self.links, names))

    def affected(self, names: Iterable[str], *, whole: bool = False) -> frozenset[str]:
        """Load other bits of some tensors, restore, and return the live tensors that changed.

        The groups of these tensors are loaded, or the ``whole`` checkpoint: a layer may create a
        tensor from the weights of another layer.
        """
        changed = frozenset(names)
        groups = [group for group in self.groups if whole or not changed.isdisjoint(group)]
        if not changed or not groups:
            return frozenset()
        seen: list[frozenset[str]] = []
        for method in self.packing:
            found = self._follow(method, groups, changed)
            seen += [] if found is None else [found]
            if found is not None and method == "repacked" and not self.findings.reload_only:
                # It repeats the engine's start, load and processing of raw layers, and so shows
                # what the start derived; no tensor needs to be updated by another method.
                return found
        plain = self._follow("loaded", groups, changed)
        untried = self.uncovered
        if plain is not None:  # a load alone processes no layer
            processed = self.state.model.processed()
            untried = frozenset(n for n in untried if _module(self.state, n) in processed)
        if untried and not seen:
            raise TensorMismatchError(
                f"the engine's {min(untried)} is loaded from no tensor of the chain, "
                "and whether it is a constant cannot be tested: loading again fails"
            )
        return frozenset().union(*seen, plain or ())

    def _follow(
        self, method: LoadMethod, groups: list[list[str]], changed: frozenset[str]
    ) -> frozenset[str] | None:
        found = self._load(method, groups, changed)
        if found and self.ignoring and method not in self.unstable:
            # Not everything can be loaded at once by this method.
            found -= self._load(method, groups, frozenset()) or frozenset()
        return found

    def expect_made(self, constants: frozenset[str]) -> None:
        """Refuse constants that are unchanged only because no load was seen to create them again.

        A layer with processing that is not empty was not processed again in any load, although
        tensors are loaded into it, or it computes from memory that cannot be inspected. A layer
        that a reload changes otherwise than a load alone was processed; an unchanged one proves
        nothing, since the reload may do nothing at all.
        """
        state = self.state
        linked = frozenset().union(*self.links.values()) | self.beyond
        doubtful = (linked & state.processed) - self.made_anew - idle(state.modules)
        doubts = sorted(live for live in constants if _module(state, live) in doubtful)
        if not doubts:
            return
        loaded, reloaded = self._digests_after("loaded"), self._digests_after("reloaded")
        layers = {state.owner[n] for n, digest in reloaded.items() if loaded.get(n) != digest}
        for live in doubts:
            if _module(state, live) not in layers:
                raise TensorMismatchError(
                    f"the engine's {live} is loaded from no tensor of the chain, and whether it is "
                    "a constant cannot be tested: no load makes it again"
                )

    def _digests_after(self, method: LoadMethod) -> Mapping[str, bytes]:
        """Return digests of what a load of other bits changes; empty if there is no such load."""
        state, names = self.state, self.state.source.present
        try:
            state.load(method, names, names)
            changed = state.changed() & state.tensors.keys()
            return {name: digest_of(state.tensors[name]) for name in changed}
        except Exception:  # noqa: BLE001 - an engine may raise anything
            return {}
        finally:
            state.put_back(partial(state.load, method, names))

    def _load(
        self, method: LoadMethod, groups: list[list[str]], changed: frozenset[str]
    ) -> frozenset[str] | None:
        if method == "reloaded" and self._is_brief(groups, changed):
            groups = self._some
            changed &= frozenset(name for group in groups for name in group)
        key = method, frozenset(name for group in groups for name in group), changed
        if key not in self.known:
            self.known[key] = self._find_changed(method, groups, changed)
        found = self.known[key]
        return None if found is None else found - self.unstable.get(method, frozenset())

    def _is_brief(self, groups: list[list[str]], changed: frozenset[str]) -> bool:
        return (
            self.brief and groups == self.groups and bool(self._load("repacked", groups, changed))
        )

    @cached_property
    def _reloaded(self) -> frozenset[str]:
        """Layers that no swap updates but by creating again what they compute with."""
        return all_layers(self.links, self.findings.reload_only.intersection(self.links))

    @cached_property
    def _some(self) -> list[list[str]]:
        groups = [LoadGroup(tuple(one), all_layers(self.links, one)) for one in self.groups]
        return [list(one.names) for one in some_of_each(self.state, self.findings, groups, 2)]

    def _find_changed(
        self, method: LoadMethod, groups: list[list[str]], changed: frozenset[str]
    ) -> frozenset[str] | None:
        found: list[frozenset[str]] = []
        parts = list(batches(groups, iter, self.state.source.specs, PART))
        is_kept = method != "repacked" or len(parts) == 1
        for part in parts:
            seen = self._find_changed_by(method, part, changed, is_kept=is_kept)
            if seen is None:
                return None
            found.append(seen)
        return frozenset().union(*found)

    def _find_changed_by(
        self, method: LoadMethod, groups: list[list[str]], changed: frozenset[str], *, is_kept: bool
    ) -> frozenset[str] | None:
        state, layers = self.state, self._filled(groups)
        if method == "repacked":
            layers |= self.beyond
        load = partial(self._load_groups, method, groups)
        outputs = frozenset[str]()
        try:
            load(changed)
            outputs = state.follows(frozenset(state.outputs))
            found = state.changed()
            self.made_anew |= layers if method == "repacked" else frozenset()
            return found.union(f"{layer}()" for layer in outputs)
        except EngineVersionError:
            self.missing.add(method)
            return None
        except Exception:  # noqa: BLE001 - an engine may raise anything
            return None
        finally:
            if not is_kept:
                state.restore_by(load, outputs & self._reloaded)
            state.put_back(load)

    def pack(self) -> None:
        """Pack all layers with other bits, as at the start; refuse what else is made from them."""
        self._load_groups("repacked", self.groups, frozenset(self.links))
        self.made_anew |= self._filled(self.groups) | self.beyond
        outputs = self.state.follows(frozenset(self.state.outputs))
        found = self.state.changed().union(f"{layer}()" for layer in outputs)
        for live in found & self.uncovered:
            raise TensorMismatchError(f"the engine derives {live}", tensor=live)

    def _load_groups(
        self, method: LoadMethod, groups: list[list[str]], changed: frozenset[str] = frozenset()
    ) -> None:
        """Load groups; some at a time if they are packed, which takes the memory of raw layers."""
        state, beyond = self.state, self.beyond if method == "repacked" else frozenset[str]()
        parts = [groups]
        if method == "repacked":
            parts = list(batches(groups, iter, state.source.specs, TOGETHER))
        for number, batch in enumerate(parts, 1):
            names = [name for group in batch for name in group]
            last = beyond if number == len(parts) else frozenset[str]()
            state.load(method, names, changed, self._filled(batch) | last)


def _uncovered(state: ModelState, findings: Findings, links: Links) -> frozenset[str]:
    filled = state.memory.tied(all_layers(links, findings.reload_only))
    holders = MemoryIndex(state.tensors.items())
    places = [place for name in findings.in_place() for place in findings.placements[name]]
    covered = frozenset().union(*(holders.overlapping(place.live) for place in places))
    reached = filled | all_layers(links, links)
    live = frozenset(
        name for name in state.tensors if name not in covered and state.owner[name] not in filled
    )
    ran = state.model.made_by_running()  # no load need make these again, not even of their layer
    numbers = {
        name for name in state.numbers if name in ran or layer_of(name, state.modules) not in filled
    }
    outputs = {f"{layer}()" for layer in state.outputs.keys() - reached}
    return (live | numbers | outputs) - findings.touched


def _outwards(search: _Search, derived: frozenset[str]) -> Iterator[Mapping[str, list[str]]]:
    """Yield the possible sources of derived tensors, scope by scope, the nearest first."""
    links = search.all_links
    scope = {live: _module(search.state, live) for live in derived}
    tried: dict[str, set[str]] = defaultdict(set)
    while scope:
        found: dict[str, list[str]] = {}
        for live, prefix in scope.items():
            inside = [
                name
                for name in links
                if name not in tried[live]
                and (not prefix or any(f"{one}.".startswith(f"{prefix}.") for one in links[name]))
            ]
            tried[live].update(inside)
            if inside and len(inside) <= NEAR:
                found[live] = inside
        yield found
        scope = {live: prefix.rpartition(".")[0] for live, prefix in scope.items() if prefix}


def _module(state: ModelState, live: str) -> str:
    if live.endswith("()"):
        return live.removesuffix("()")
    return layer_of(live, state.modules)


logger = logging.getLogger(__name__)


def find_unused(state: ModelState, layout: "Layout", names: Iterable[str]) -> dict[str, str]:
    """Load the whole checkpoint with other bits in some tensors alone: nothing may change.

    Returns why each of the tensors, which no rank holds, is not proven to be unused; empty for an
    unused one. The state is restored afterwards.
    """
    wanted = list(names)
    if state.opaque:
        why = f"{min(state.opaque)} may use it, and its weights cannot be inspected"
        return dict.fromkeys(wanted, why)
    try:
        held = _held(state, layout, wanted)
        left = [name for name in wanted if name not in held]
        if not left or not _followed(state, layout, left):
            return dict.fromkeys(left, "") | held
        return {name: _followed(state, layout, [name]) for name in left} | held
    finally:
        restore_outputs(state)


def _held(state: ModelState, layout: "Layout", names: Iterable[str]) -> dict[str, str]:
    """Return tensors in a parameter that no update reaches, which a loader may write only once."""
    places = [place for places in layout.places.values() for place in places]
    reached = {place.live.untyped_storage().data_ptr() for place in places}
    unreached = [
        (live, tensor)
        for live, tensor in state.tensors.items()
        if isinstance(tensor, nn.Parameter)
        and tensor.untyped_storage().data_ptr() not in reached
        and state.owner[live] not in layout.layers
    ]
    found: dict[str, str] = {}
    for name in names if unreached else ():
        for _, tensor in state.source.clones([name]):
            for live, parameter in unreached:
                if parameter.numel() != tensor.numel():
                    continue
                same = tensor.reshape(-1).to(parameter.device, parameter.dtype)
                if torch.equal(parameter.detach().reshape(-1), same):
                    found[name] = f"{live} holds its bits, and no load writes it again"
    return found


def _followed(state: ModelState, layout: "Layout", changed: Sequence[str]) -> str:
    """Return which changes some tensors cause; empty for none, if loads of the others changed some.

    All tensors have other bits in these loads, to reveal one that acts only together with others.
    """
    repacked = [group for method, group in layout.groups if method == "repacked"]
    packed = frozenset().union(*(group.layers for group in repacked))
    proven = [name for group in repacked for name in group.names]
    others = [name for name in state.source.present if name not in changed]
    loads: list[tuple[LoadMethod, frozenset[str], list[str]]] = [
        ("loaded", frozenset(), others),
        ("reloaded", frozenset(), [name for name in others if name not in proven]),
    ]
    done = 0
    for method, layers, names in [*loads, ("repacked", packed, proven)] if packed else loads:
        every = [*names, *changed]
        try:
            state.load(method, every, names, layers)
            if not state.changed():
                continue  # this method changes nothing, which proves nothing
            before = state.now()
            state.load(method, every, every, layers)
            before.expect_same()
            done += method in RELOADS
        except TensorMismatchError as exc:
            return str(exc.args[0])
        except Exception as exc:  # noqa: BLE001 - an engine may raise anything
            logger.debug("a full load by method %r raised: %r", method, exc)
        finally:
            state.put_back()
    return "" if done else "no full load was possible"
