"""Prove that tensors can be written in place, and find those that cannot."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, zip_longest
from typing import Any, Final

import torch

from deltachain.kernels.protocol import LiveBits, same_bits
from deltachain.replica.placements import Placement
from deltachain.subscribe.targets.tensor_patch import varied
from deltachain.torch_names import WIRE_NAMES

from .findings import Findings, Links, all_layers, components, links_of
from .loaded_checkpoint import LoadedCheckpoint, made_ahead
from .model_state import ModelState
from .module_members import SMALL, in_threads, span
from .reloads import flip_bits, holds_bits, write_bits


@dataclass(frozen=True, slots=True)
class ReadBack:
    """Live bits compared with the checkpoint's.

    ``reasons`` say which tensors are stored in another form; ``changed`` ones of these have other
    bits. The ``held`` ones, with their places, are stored as the checkpoint has them.
    """

    reasons: Mapping[str, str]
    changed: frozenset[str]
    held: Mapping[str, Sequence[Placement]]


def read_back(source: LoadedCheckpoint, placements: Mapping[str, Sequence[Placement]]) -> ReadBack:
    def compare(name: str) -> tuple[str, bool]:
        why, is_changed = "", False
        for place in placements[name]:
            dtype = WIRE_NAMES.get(place.live.dtype)
            if dtype != source.specs[name].dtype:
                why = why or f"the engine serves it as {dtype}"
            elif not _holds(source, name, place):
                why, is_changed = why or "the engine changed its bits after loading", True
        return why, is_changed

    placed = [name for name, places in placements.items() if places]
    compared = in_threads(compare, placed, lambda name: placements[name][0].live)
    found = dict(zip(placed, compared, strict=True))
    reasons = {name: why for name, (why, _) in found.items() if why}
    changed = frozenset(name for name, (_, is_changed) in found.items() if is_changed)
    held = {name: placements[name] for name in placed if name not in reasons}
    return ReadBack(reasons, changed, held)


def _holds(source: LoadedCheckpoint, name: str, place: Placement) -> bool:
    view: Any = place.view
    return all(same_bits(view[where], bits) for where, bits in source.parts(name, place))


def again(
    source: LoadedCheckpoint, held: Mapping[str, Sequence[Placement]]
) -> dict[int, Callable[[], None]]:
    """Return functions that write whole storages again from the checkpoint, by address."""
    return {
        address: partial(_write_again, source, sharing)
        for address, sharing in _by_storage(held).items()
        if _is_covered(sharing)
    }


def _write_again(source: LoadedCheckpoint, sharing: Iterable[tuple[str, Placement]]) -> None:
    for name, place in sharing:
        view: Any = place.view
        for where, bits in source.parts(name, place):
            view[where] = bits


def _is_covered(sharing: Sequence[tuple[str, Placement]]) -> bool:
    """Return whether places, all of one width, cover the storage that they share."""
    live = sharing[0][1].live
    if any(place.live.element_size() != live.element_size() for _, place in sharing):
        return False
    sizes = [place.window.numel * live.element_size() for _, place in sharing]
    nbytes = live.untyped_storage().nbytes()
    return max(sizes) == nbytes or (sum(sizes) == nbytes and not _overlapping(sharing))


def _overlapping(sharing: Sequence[tuple[str, Placement]]) -> set[str]:
    """Return the names of places that share elements with an earlier place in their storage."""
    spans = sorted(span(place.live) for _, place in sharing)
    if all(one[1] <= other[0] for one, other in pairwise(spans)):
        return set()
    found: set[str] = set()
    live = sharing[0][1].live
    taken = torch.zeros(live.untyped_storage().nbytes() // live.element_size(), dtype=torch.bool)
    for name, place in sharing:
        mine = taken.as_strided(place.live.shape, place.live.stride(), place.at)
        if bool(mine.any()):
            found.add(name)
        mine.fill_(True)
    return found


def compare_bits(readback: ReadBack, findings: Findings) -> Findings:
    """Compare live bits with the checkpoint's: a processed parameter cannot be written."""
    return replace(
        findings.not_in_place(readback.reasons),
        reload_only=findings.reload_only | readback.changed,
        readable=frozenset(readback.held),
    )


def find_overlapping(findings: Findings) -> Findings:
    """Find tensors that would overwrite one another; tied names are one tensor."""
    shared = map(_overlapping, _by_storage(findings.placements).values())
    overlapping = frozenset[str]().union(*shared)
    names = [name for name in findings.placements if name in overlapping]
    reasons = dict.fromkeys(names, "it shares live elements with another tensor")
    return replace(findings.only_reloaded(reasons), overlapping=overlapping)


def find_transformed(state: ModelState, findings: Findings) -> Findings:
    """Find tensors that are loaded into some layer, but stored nowhere in their original form."""
    reasons = {
        name: f"{min(layers)} does not keep it in its loaded form"
        for name, layers in findings.loaded_into.items()
        if layers and state.source.specs[name].numel
        if not findings.placements[name] and name not in findings.reasons
    }
    return findings.only_reloaded(reasons)


UNIFORM: Final = "all elements are equal, so their placement cannot be verified"
STRAYED: Final = "other values loaded into it do not arrive where it was recorded"


def verify_uniform(state: ModelState, findings: Findings) -> Findings:
    """Load other values of uniform tensors: they must arrive at the recorded places.

    Equal elements match wherever they are read back, even where another tensor overlaps them.
    """
    source = state.source
    links = links_of(state, findings, source.present)
    uniform = [
        name
        for name in findings.in_place()
        if name in source.uniform and links[name].isdisjoint(state.processed)
    ]
    layers = all_layers(links, uniform)
    names = [name for name in links if links[name] & layers]
    with suppress(Exception):
        if uniform:
            state.load("loaded", names, uniform, layers)
    lost = [n for n in uniform if not holds_bits(findings.placements[n], source.other(n))]
    state.put_back()
    return findings.only_reloaded(dict.fromkeys(lost, STRAYED))


def verify_in_place(state: ModelState, findings: Findings) -> Findings:
    """Write other bits of each tensor alone: its layers must compute from them.

    One bit of each element is flipped in place first, which needs no copy, and again to restore it.
    A tensor that this may not show, a small one or zeros, is written with other numbers.
    """
    source, computing = state.source, state.outputs.keys() & state.processed
    found = links_of(state, findings, findings.in_place())
    links = {name: layers & computing for name, layers in found.items() if layers & computing}
    places = findings.placements

    def flip(names: Sequence[str]) -> None:
        for name in names:
            flip_bits(places[name])

    def write(make: Callable[[str], LiveBits], names: Sequence[str]) -> None:
        for name, bits in zip(names, made_ahead(make, names, source.specs), strict=True):
            write_bits(places[name], bits)

    reasons: dict[str, str] = {}
    for picked in zip_longest(*components(links, links)):
        names = [name for name in picked if name is not None]
        doubtful = _unfollowed(state, links, names, flip, flip)
        other, first = partial(write, source.other), partial(write, source.bits)
        again = [n for n in doubtful if n in source.uniform or source.specs[n].nbytes < SMALL]
        reasons |= {name: why for name, why in doubtful.items() if name not in again}
        reasons |= _unfollowed(state, links, again, other, first)
    return findings.only_reloaded(reasons)


def _unfollowed(
    state: ModelState,
    links: Links,
    names: Sequence[str],
    write: Callable[[Sequence[str]], None],
    restore: Callable[[Sequence[str]], None],
) -> dict[str, str]:
    """Return why layers do not compute from other bits of tensors, written at once."""
    layers, reasons = all_layers(links, names), dict[str, str]()
    write(names)
    followed = state.follows(layers)
    restore(names)
    left = state.follows(layers)
    for name in names:
        packed, unstable = links[name] - followed, links[name] & left
        if packed:
            reasons[name] = f"{min(packed)} computes from a packed copy"
        elif unstable:
            reasons[name] = f"{min(unstable)} does not restore its output"
    return reasons


def refuse_unverifiable(state: ModelState, findings: Findings) -> Findings:
    """Refuse uniform tensors that the engine may have rearranged.

    They match in any arrangement, and loading them again restores them. The arrangement is known
    from other bits in the same live storage, or if the layer multiplies correctly by a pattern.
    """
    for find in (_uniform_matrices, _uniform_storages):
        names = find(state, findings)
        found = findings.only_reloaded(dict.fromkeys(names, UNIFORM))
        findings = replace(found, unverifiable=findings.unverifiable.union(names))
    return findings


def _uniform_matrices(state: ModelState, findings: Findings) -> list[str]:
    """Return uniform matrices that cannot be read back, in layers without another matrix.

    Vectors are processed like the matrix beside them.
    """
    source = state.source
    matrices = [name for name in source.present if len(source.specs[name].shape) > 1]
    found = links_of(state, findings, matrices)
    links = {name: layers & state.processed for name, layers in found.items()}
    shown = all_layers(links, [name for name in links if name not in source.uniform])
    kept = frozenset(findings.in_place())
    return [
        name
        for name in links
        if name in source.uniform
        and name not in kept
        and not links[name] <= shown
        and not all(map(state.model.is_plain, links[name]))
    ]


def _uniform_storages(state: ModelState, findings: Findings) -> list[str]:
    """Return the tensors in storages of processed layers that contain only uniform tensors."""
    reloads = findings.reload_only - findings.unverifiable
    reloaded = frozenset().union(*(findings.loaded_into.get(n, frozenset()) for n in reloads))
    found: list[str] = []
    kept = {name: findings.placements[name] for name in findings.in_place()}
    for sharing in _by_storage(kept).values():
        layers = state.memory.in_storage_of(sharing[0][1].live)
        if layers.isdisjoint(state.processed):
            continue
        if any(_varies(state.source, name, place) for name, place in sharing):
            continue
        if not layers.isdisjoint(reloaded) or all(map(state.model.is_plain, layers)):
            continue  # its other tensors, or its output, show whether loading again is exact
        found += [name for name, _ in sharing]
    return found


def _varies(source: LoadedCheckpoint, name: str, place: Placement) -> bool:
    if name in source.uniform or place.numel == source.specs[name].numel:
        return name not in source.uniform
    return varied(place.cut(source.bits(name)))


def _by_storage(
    placements: Mapping[str, Iterable[Placement]],
) -> dict[int, list[tuple[str, Placement]]]:
    stored: dict[int, list[tuple[str, Placement]]] = defaultdict(list)
    for name, places in placements.items():
        for place in places:
            stored[place.live.untyped_storage().data_ptr()].append((name, place))
    return stored
