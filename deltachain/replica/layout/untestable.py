"""Layers that cannot be tested, and may compute from memory that cannot be inspected."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from deltachain.errors import TensorMismatchError
from deltachain.replica.layout.findings import Findings
from deltachain.replica.layout.links import Links, all_layers, links_of
from deltachain.replica.layout.load_methods import RELOADS, load_with, modules_in
from deltachain.replica.layout.loaded_checkpoint import LoadedCheckpoint
from deltachain.replica.layout.members import Members
from deltachain.replica.layout.model_state import ModelState
from deltachain.replica.layout.opaque import may_hide_tensors


def find_untestable(state: ModelState, source: LoadedCheckpoint, findings: Findings) -> Findings:
    """Find layers whose output cannot be computed, and whose members cannot all be inspected.

    Only layers with post-load processing can be such layers: either they are already, or processing
    them once more shows it.

    Raises:
        TensorMismatchError: There is such a layer already. Nothing is loaded then, since restoring
            it could not be verified.
    """
    links = links_of(state, source, findings, source.present)
    doubtful = (all_layers(links, links) & state.processed) - state.outputs.keys()
    if not doubtful:
        return findings
    _refuse_opaque(state, links, doubtful)
    names = [name for name in links if links[name] & doubtful]
    scope = state.memory.tied(all_layers(links, names))
    untestable = _opaque_after_reload(state, source, names, scope, doubtful)
    reasons = {
        name: f"the weights that {min(links[name] & untestable)} computes with cannot be inspected"
        for name in names
        if links[name] & untestable
    }
    return replace(findings.only_reloaded(reasons), untestable=untestable)


def _refuse_opaque(state: ModelState, links: Links, doubtful: frozenset[str]) -> None:
    for layer in sorted(doubtful & state.opaque):
        name = min(name for name in links if layer in links[name])
        raise TensorMismatchError(
            f"{layer} keeps its weights where they can be neither inspected nor tested: "
            f"{name!r} cannot be written",
            tensor=name,
            hint="set linear and MoE backends that keep weights in tensors",
        )


def _opaque_after_reload(
    state: ModelState,
    source: LoadedCheckpoint,
    names: Sequence[str],
    scope: frozenset[str],
    doubtful: frozenset[str],
) -> frozenset[str]:
    """Return doubtful layers with uninspectable members after processing, or not processed."""
    found: set[str] = set()
    processed: set[str] = set()
    for method in RELOADS:
        members = {layer: Members(modules_in(state.model, {layer})) for layer in doubtful}
        with suppress(Exception):
            load_with(state.model, method, scope, source.clones(names))
            processed |= doubtful
            found |= {n for n, one in members.items() if any(map(may_hide_tensors, one.replaced()))}
        state.put_back()
    return frozenset(found | (doubtful - processed))
