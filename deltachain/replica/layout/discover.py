"""Discover how each checkpoint tensor reaches one rank's live weights, and prove it.

Nothing is assumed about an engine. The writes of its loader are recorded; their results are read
back and compared with the checkpoint, bit for bit; the inputs of its layers are tested, tensor by
tensor. A tensor is written in place only if all of that agrees. Otherwise the engine loads it
again, if that is exact and the model follows this tensor alone; if not, it is refused by name. In
any case the engine holds exactly the same bits afterwards as before.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from torch import nn

from deltachain.errors import TensorMismatchError
from deltachain.replica.engine import EngineModel
from deltachain.replica.freed_memory import trim_memory
from deltachain.replica.placements import Placement

from .classes import ON_HOST, Classified, Form, TensorClass
from .derived import find_derived
from .findings import Findings, from_recording, require_classes
from .fresh_load import find_comparable
from .in_place import (
    ReadBack,
    again,
    compare_bits,
    find_overlapping,
    find_transformed,
    read_back,
    refuse_unverifiable,
    verify_in_place,
    verify_uniform,
)
from .load_recorder import Recording, record
from .loaded_checkpoint import LoadedCheckpoint
from .model_state import RELOADS, LoadGroup, LoadMethod, ModelState, restore_outputs
from .module_members import storage_id, undisturbed
from .reloads import decide_remaining, find_untestable, try_loading, try_reloading


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of one rank: how each tensor is updated."""

    classes: Mapping[str, TensorClass]
    reasons: Mapping[str, str]  # reasons of the tensors that are not in place
    places: Mapping[str, tuple[Placement, ...]]
    groups: tuple[tuple[LoadMethod, LoadGroup], ...] = ()
    readable: Mapping[str, tuple[Placement, ...]] = field(default_factory=dict)
    comparable: frozenset[LoadGroup] = frozenset()
    idle: frozenset[str] = frozenset()  # tensors that the engine loads with others
    windows: Mapping[str, tuple[Form, ...]] = field(default_factory=dict)  # of those on the host

    def comparing(self, compared: Container[str]) -> "Layout":
        kept = {g for g in self.comparable if all(name in compared for name in g.names)}
        return replace(self, comparable=frozenset(kept))

    @property
    def layers(self) -> frozenset[str]:
        return frozenset().union(*(group.layers for _, group in self.groups))

    def report(self) -> dict[str, Classified]:
        reloaded = (group for method, group in self.groups if method in RELOADS)
        groups = {name: group for group in reloaded for name in group.names}
        return {
            name: Classified(
                kind=kind,
                reason=self.reasons.get(name, ""),
                layers=tuple(sorted(groups[name].layers)) if name in groups else (),
                comparable=name in groups and groups[name] in self.comparable,
                windows=forms(self.places.get(name, ())) or self.windows.get(name, ()),
            )
            for name, kind in self.classes.items()
        }


def forms(places: Iterable[Placement]) -> tuple[Form, ...]:
    windows = [place.window for place in places]
    return tuple((one.offset, one.size, one.stride) for one in windows)


@dataclass(frozen=True, slots=True)
class Recorded:
    """Where a loader stores each tensor, and whether the bits there are the checkpoint's."""

    recording: Recording
    placements: Mapping[str, tuple[Placement, ...]]
    readback: ReadBack


def recorded(model: EngineModel, source: LoadedCheckpoint) -> Recorded:
    """Record the engine's loader, and read live bits back; nothing is written."""
    recording = record(model.load, source.loaded.values(), model.modules())
    placements = recording.placements(source.owner)
    return Recorded(recording, placements, read_back(source, placements))


def discover(
    model: EngineModel,
    source: LoadedCheckpoint,
    required: Mapping[str, TensorClass] | None = None,
    *,
    seen: Recorded | None = None,
) -> Layout:
    """Find how to update every tensor of a chain in a rank that holds the checkpoint it loaded."""
    seen = seen or recorded(model, source)
    rewrites = again(source, seen.readback.held)
    with undisturbed(model.modules().values(), model.tensors(), rewrites) as saved:
        state = ModelState(model, source, saved)
        try:
            findings = from_recording(state, seen.recording)
            findings = _decide(state, findings, seen.readback, required or {})
        finally:
            restore_outputs(state)
        comparable, incomparable = find_comparable(model, findings.groups, source.clones)
    classes, placements = findings.classes, findings.placements
    reasons = {n: r for n, r in findings.reasons.items() if classes[n] != "in_place"}
    for name, why in incomparable.items():
        told = f"it is not compared with a fresh load after a swap: {why}"
        reasons[name] = f"{reasons[name]}; {told}" if name in reasons else told
    return Layout(
        classes=classes,
        reasons=reasons,
        places={n: found for n, found in placements.items() if classes[n] == "in_place"},
        groups=findings.groups,
        readable={n: placements[n] for n in findings.readable if classes[n] in ON_HOST},
        comparable=comparable,
        idle=findings.idle,
        windows={n: forms(found) for n, found in placements.items() if classes[n] in ON_HOST},
    )


def _decide(
    state: ModelState, findings: Findings, readback: ReadBack, required: Mapping[str, TensorClass]
) -> Findings:
    """Decide the class of every tensor, step by step; each step restores the model."""
    # Which tensors have a worse class on another rank?
    findings = require_classes(findings, required)
    # Which tensors are stored as they were loaded? Which share elements? Which are not stored?
    findings = compare_bits(readback, findings)
    findings = find_overlapping(findings)
    findings = find_transformed(state, findings)
    # Which layers can be neither inspected nor tested?
    findings = find_untestable(state, findings)
    # Which tensors can be written in place, and do all of their layers compute from them?
    findings = verify_uniform(state, findings)
    findings = verify_in_place(state, findings)
    findings = refuse_unverifiable(state, findings)
    # Which of the others does the engine's own loader update exactly?
    findings = try_loading(state, findings)
    # Which live tensors are derived, and from what? Their sources must be reloaded.
    findings = find_derived(state, findings)
    trim_memory()
    # Which of the remaining tensors does a reload of whole layers update exactly? Refuse the rest.
    findings = try_reloading(state, findings)
    return decide_remaining(findings)


def rediscover(model: EngineModel, source: LoadedCheckpoint, before: Layout) -> Layout:
    """Find the placements again in an engine that replaced its tensors, whatever their content."""
    recording = record(model.load, source.loaded.values(), model.modules())
    found = recording.placements(source.owner)
    after = replace(
        before,
        places={name: found[name] for name in before.places},
        readable={name: found[name] for name in before.readable},
    )
    if after.report() != before.report():
        raise TensorMismatchError(
            "the engine changed the layout of its weights", hint="restart the engine to follow on"
        )
    return after


Content: TypeAlias = frozenset[object]
"""The tensors of one slot, with their windows and where in the slot these are."""


class ExpertSlots:
    """A map of experts in slots, and the places that the engine's loader writes while it holds.

    An engine that balances experts copies them into several slots of the stacked weights, and moves
    them while it serves. Its map says where they are; a recording of its loader says which tensors
    go where. The map is believed if both agree: an expert has the same tensors in all of its slots,
    now and under earlier maps, and no two experts have the same ones; else a
    :class:`TensorMismatchError` is raised. The bits that moved are proven by the state digest.
    """

    def __init__(
        self, model: EngineModel, source: LoadedCheckpoint, before: "ExpertSlots | None" = None
    ) -> None:
        self.slots = model.slots()
        self.places: Mapping[str, tuple[Placement, ...]] = {}
        self._contents: dict[str, dict[int, Content]] = {}
        if not self.slots:
            return
        modules = model.modules()
        self.places = record(model.load, source.loaded.values(), modules).placements(source.owner)
        for layer, experts in self.slots.items():
            known = before._contents.get(layer, {}) if before else {}
            found = _contents(modules[layer], len(experts), self.places)
            self._contents[layer] = _agreed(layer, experts, found, known)

    def moved(self, layout: Layout, before: "ExpertSlots") -> Layout:
        """Return the layout of a rank whose experts have moved from the slots of ``before``."""
        unknown = any(not group.layers for _, group in layout.groups)
        for layer, experts in self.slots.items():
            came = set(experts) - set(before.slots.get(layer, ()))
            if came and (unknown or layer in layout.layers):
                raise TensorMismatchError(
                    f"expert {min(came)} of {layer} came to a rank that has no copy of it to load",
                    hint="restart the engine to follow on",
                )
        written = {storage_id(one.live) for places in layout.places.values() for one in places}
        places = {n: self.places[n] for n, kind in layout.classes.items() if kind in _HERE}
        for name, found in places.items():
            if any(storage_id(one.live) not in written for one in found):
                raise TensorMismatchError(
                    f"{name!r} moved to a tensor that was not proven", tensor=name
                )
        kinds: dict[str, TensorClass] = {
            name: "in_place" if found else "absent" for name, found in places.items()
        }
        return replace(
            layout,
            classes={**layout.classes, **kinds},
            places={name: found for name, found in places.items() if found},
            readable={name: self.places[name] for name in layout.readable},
        )


_HERE = ("in_place", "absent")


def _contents(
    layer: nn.Module, count: int, places: Mapping[str, tuple[Placement, ...]]
) -> list[set[object]]:
    """Return the tensors that a loader writes to each slot of a layer's parameters."""
    stacked = {
        storage_id(tensor): (path, tensor)
        for path, tensor in layer.named_parameters()
        if tensor.ndim and len(tensor) == count
    }
    found: list[set[object]] = [set() for _ in range(count)]
    for name, windows in places.items():
        for place in windows:
            path, tensor = stacked.get(storage_id(place.live), ("", None))
            if tensor is None:
                continue
            width = tensor.stride(0)
            slot, at = divmod(place.at - int(tensor.storage_offset()), width)
            if at + sum((dim.size - 1) * dim.live for dim in place.dims) >= width:
                raise TensorMismatchError(
                    f"the engine loads several experts of {name!r} at once", tensor=name
                )
            found[slot].add((path, at, name, place.offset, place.dims))
    return found


def _agreed(
    layer: str, experts: tuple[int, ...], found: list[set[object]], known: Mapping[int, Content]
) -> dict[int, Content]:
    """Return the tensors of each expert that was seen, or refuse a loader that knows others."""
    contents = dict(known)
    for expert, content in zip(experts, found, strict=True):
        if contents.setdefault(expert, frozenset(content)) != content:
            raise TensorMismatchError(
                f"the engine loads other tensors into the slots of expert {expert} of {layer} "
                "than its map of experts says",
                hint="start it without the mode that moves experts",
            )
    if len(set(contents.values())) != len(contents):
        raise TensorMismatchError(
            f"the engine loads the same tensors into the slots of different experts of {layer}",
            hint="start it without the mode that moves experts",
        )
    return contents
