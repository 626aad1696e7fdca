"""Discover how each checkpoint tensor reaches one rank's live weights, and prove it.

Nothing is assumed about an engine. The writes of its loader are recorded; their results are read
back and compared with the checkpoint, bit for bit; the inputs of its layers are tested, tensor by
tensor. A tensor is written in place only if all of that agrees. Otherwise the engine loads it
again, if that is exact and the model follows this tensor alone; if not, it is refused by name. In
any case the engine holds exactly the same bits afterwards as before.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

from deltachain.errors import TensorMismatchError
from deltachain.replica.engine import EngineModel
from deltachain.replica.freed_memory import trim_memory
from deltachain.replica.placements import Placement

from .classes import ON_HOST, Classified, Form, TensorClass
from .derived import find_derived, reload_at_once
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
from .module_members import undisturbed
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
    # Does a reload of whole layers update all of the remaining tensors, and whatever they make?
    reloaded = reload_at_once(state, findings)
    if reloaded is None:
        # Which live tensors are derived, and from what? Their sources must be reloaded.
        findings = find_derived(state, findings)
        trim_memory()
        # Which of the remaining tensors does a reload update exactly? Refuse the rest.
        reloaded = try_reloading(state, findings)
    return decide_remaining(reloaded)


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
