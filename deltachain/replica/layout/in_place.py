"""Proof that tensors can be written in place; what fails it must go another way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from itertools import zip_longest

from deltachain.replica.layout.components import components
from deltachain.replica.layout.finding import Finding
from deltachain.replica.layout.other_bits import mixed
from deltachain.replica.layout.rest import lies, write
from deltachain.replica.layout.ways import bring
from deltachain.replica.windows import Placement
from deltachain.subscribe.targets.patch import varied

ALIKE = "all elements are equal, so their placement cannot be verified"


def expect_loaded(finding: Finding) -> None:
    """Load others of the tensors that are all alike: they must arrive where they were recorded.

    What is alike reads back well wherever it is, also where another tensor lies over it.
    """
    state, source = finding.state, finding.source
    links = {name: finding.links(name) for name in source.present}
    alike = [
        name
        for name in finding.in_place()
        if links[name].isdisjoint(state.processed) and name in finding.flat
    ]
    layers = frozenset().union(*(links[name] for name in alike))
    names = [name for name in links if links[name] & layers]
    with suppress(Exception):
        if alike:
            bring(finding.model, "loaded", layers, mixed(source.clones, names, alike))
    for name in alike:
        if not lies(finding.places[name], source.other(name)):
            finding.break_(name, "other bits of it do not arrive at its place")
    state.put_back()


def try_in_place(finding: Finding) -> None:
    """Write other bits of each tensor alone: its layers must compute from them."""
    state = finding.state
    computing = state.outputs.keys() & state.processed
    links = {name: finding.links(name) & computing for name in finding.in_place()}
    groups = components([name for name in links if links[name]], links, ())
    for names in zip_longest(*groups):
        _try(finding, [name for name in names if name is not None], links)


def _try(finding: Finding, names: list[str], links: Mapping[str, frozenset[str]]) -> None:
    state, layers = finding.state, frozenset().union(*(links[name] for name in names))
    for name in names:
        write(finding.places[name], finding.source.other(name))
    found = state.follows(layers)
    for name in names:
        write(finding.places[name], finding.source.bits(name))
        for layer in sorted(links[name] - found):
            finding.break_(name, f"{layer} computes from a packed copy")
    left = state.follows(layers)
    for name in names:
        for layer in sorted(links[name] & left):
            finding.break_(name, f"{layer} does not compute the same again")


def refuse_alike(finding: Finding) -> None:
    """Refuse bits that are all alike where the engine may have rearranged them.

    They read back well however they lie, and loading them again leads back to them. Other bits
    in the same live storage show what became of it; so does a layer that multiplies by a
    pattern as it should.
    """
    for name in _hidden_alike(finding):
        finding.alike.add(name)
        finding.break_(name, ALIKE)
    sharing: dict[int, list[tuple[str, Placement]]] = defaultdict(list)
    for name in finding.in_place():
        for place in finding.places[name]:
            sharing[place.live.untyped_storage().data_ptr()].append((name, place))
    processed, plain = finding.state.processed, finding.model.is_plain
    broken = frozenset().union(
        *(finding.layers.get(name, frozenset()) for name in finding.broken - finding.alike)
    )
    for shared in sharing.values():
        layers = finding.holders.of_storage(shared[0][1].live)
        if layers.isdisjoint(processed) or _shows(finding, shared):
            continue
        if not layers.isdisjoint(broken) or all(map(plain, layers)):
            continue  # what else is in it shows whether loading again is exact; or it computes
        for name, _ in shared:
            finding.alike.add(name)
            finding.break_(name, ALIKE)


def _shows(finding: Finding, shared: list[tuple[str, Placement]]) -> bool:
    return any(varied(place.cut(finding.source.bits(name))) for name, place in shared)


def _hidden_alike(finding: Finding) -> list[str]:
    """Matrices that are all alike, cannot be read back, and lie beside none that is not.

    Vectors are made of by what is made of the matrix that they are beside.
    """
    source, processed = finding.source, finding.state.processed
    kept = frozenset(finding.in_place())
    links = {
        n: finding.links(n) & processed for n in source.present if len(source.specs[n].shape) > 1
    }
    shown = frozenset().union(*(links[name] for name in links if name not in finding.flat))
    return [
        name
        for name in links
        if name in finding.flat
        and name not in kept
        and not links[name] <= shown
        and not all(map(finding.model.is_plain, links[name]))
    ]
