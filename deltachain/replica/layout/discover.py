"""Which way leads each checkpoint tensor into one rank's live weights, found out and proven.

Nothing is believed of an engine. What its loader does is recorded; what it did is read back and
compared with the checkpoint, bit for bit; what it computes from is tried, tensor by tensor. A
tensor is written in place only if all of that agrees. Otherwise its way is the engine's own
loading, if that is exact and the model follows this tensor alone, and if not, it is refused by
name. Whatever is found, the engine holds afterwards exactly what it held before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from deltachain.errors import TensorMismatchError
from deltachain.replica.engine import EngineModel
from deltachain.replica.layout.components import distinct
from deltachain.replica.layout.derived import find_derived
from deltachain.replica.layout.engine_loads import decide_rest, try_loading, try_reloading
from deltachain.replica.layout.findings import Findings, from_recording, require_classes
from deltachain.replica.layout.healing import heal
from deltachain.replica.layout.in_place import refuse_unverifiable, verify_in_place, verify_uniform
from deltachain.replica.layout.members import undisturbed
from deltachain.replica.layout.read_back import compare_bits, find_overlapping, find_transformed
from deltachain.replica.layout.recorder import record
from deltachain.replica.layout.source import LoadedCheckpoint
from deltachain.replica.layout.state import ModelState
from deltachain.replica.layout.untestable import find_untestable
from deltachain.replica.layout.update_path import ON_HOST, Classified, TensorClass
from deltachain.replica.layout.ways import Group, Way
from deltachain.replica.windows import Placement


@dataclass(frozen=True, slots=True)
class Layout:
    """The ways into one rank.

    Attributes:
        classes: Of every tensor of the chain.
        reasons: Of those that are not in place.
        places: Of those that are, aliases included.
        groups: Of those that the engine loads, with their way.
        readable: Where those of these are that lie bit by bit in a live tensor, beside what is
            computed from.
    """

    classes: Mapping[str, TensorClass]
    reasons: Mapping[str, str]
    places: Mapping[str, tuple[Placement, ...]]
    groups: tuple[tuple[Way, Group], ...] = ()
    readable: Mapping[str, tuple[Placement, ...]] = field(default_factory=dict)

    @property
    def layers(self) -> frozenset[str]:
        """Layers that the engine loads into."""
        return frozenset().union(*(group.layers for _, group in self.groups))

    def report(self) -> dict[str, Classified]:
        """What the leader is told."""
        return {
            name: Classified(
                kind=kind,
                reason=self.reasons.get(name, ""),
                windows=tuple(
                    (p.window.offset, p.window.size, p.window.stride)
                    for p in self.places.get(name, ())
                ),
            )
            for name, kind in self.classes.items()
        }


def discover(
    model: EngineModel, source: LoadedCheckpoint, required: Mapping[str, TensorClass] | None = None
) -> Layout:
    """Find a way for every tensor of a chain into a rank that holds the checkpoint it loaded.

    Args:
        model: Not in use meanwhile. Its modules hold afterwards what they held, bit for bit; the
            bits are kept on the host meanwhile.
        source: The checkpoint that it loaded.
        required: Classes that another rank gave some tensors.

    Raises:
        TensorMismatchError: The engine keeps weights that no tensor is the source of.
        EngineDamagedError: It computes something else than before, and nothing leads back.
    """
    with undisturbed(model.modules().values(), model.tensors()) as bits:
        recording = record(model.load, source.loaded.values(), model.modules())
        state = ModelState(model, bits)
        try:
            findings = _steps(state, source, from_recording(state, source, recording), required)
        finally:
            heal(state, source)
    return _layout(findings)


def _steps(
    state: ModelState,
    source: LoadedCheckpoint,
    findings: Findings,
    required: Mapping[str, TensorClass] | None,
) -> Findings:
    """Decide one thing after another. Steps that take the state load, write or compute."""
    findings = require_classes(findings, required or {})
    findings = compare_bits(source, findings)
    findings = find_overlapping(findings)
    findings = find_transformed(source, findings)
    findings = find_untestable(state, source, findings)
    findings = verify_uniform(state, source, findings)
    findings = verify_in_place(state, source, findings)
    findings = refuse_unverifiable(state, source, findings)
    findings = try_loading(state, source, findings)
    findings = find_derived(state, source, findings)
    findings = try_reloading(state, source, findings)
    return decide_rest(findings)


def rediscover(model: EngineModel, source: LoadedCheckpoint, before: Layout) -> Layout:
    """Find places again in an engine that replaced its tensors, whatever they hold now.

    Raises:
        TensorMismatchError: It also changed how it lays them out.
    """
    recording = record(model.load, source.loaded.values(), model.modules())
    found: dict[str, list[Placement]] = {name: [] for name in source.specs}
    for here, places in recording.places.items():
        found[source.owner[here]] += places
    after = replace(
        before,
        places={name: tuple(distinct(found[name])) for name in before.places},
        readable={name: tuple(distinct(found[name])) for name in before.readable},
    )
    if after.report() != before.report():
        raise TensorMismatchError(
            "the engine laid its weights out anew", hint="restart the engine to follow on"
        )
    return after


def _layout(findings: Findings) -> Layout:
    classes, placements = findings.classes, findings.placements
    return Layout(
        classes=classes,
        reasons={n: r for n, r in findings.reasons.items() if classes[n] != "in_place"},
        places={n: found for n, found in placements.items() if classes[n] == "in_place"},
        groups=findings.groups,
        readable={n: placements[n] for n in findings.readable if classes[n] in ON_HOST},
    )
