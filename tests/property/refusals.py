"""Kinds of refusal that are known to hit engines for which a way exists, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

KNOWN: Final[Mapping[str, str]] = {
    "the tensor loaded last would overwrite the other": (
        "two tensors are written to one place; they could be loaded as one group, in their order"
    ),
    "loading it again would not verify it either": (
        "equal elements in a layer that is rearranged do not show where they go"
    ),
    "whose elements are all equal": (
        "it may be left out by a reload that leaves the same bits there"
    ),
    "nothing changes with": (
        "a reload may have left it out, and there is no load from nothing that confirms it"
    ),
    "does not change with": (
        "a layer that keeps a copy of it in an old kernel looks the same, where no load from "
        "nothing tells them apart"
    ),
    "neither inspected nor tested": (
        "a layer that hides its weights from the start could be reloaded, but nothing would show "
        "that the weights from before are put back"
    ),
    "do not arrive where it was recorded": (
        "a layer that is rearranged by one of its own tensors shows other places for other values"
    ),
    "no load makes it again": "a reload that does not process the layer again looks the same",
    "whether it is a constant cannot be tested": "no load of everything is possible",
    "on which tensors is unknown": (
        "loading one tensor alone does not bring what is derived from several; the layers of a "
        "tensor that the loader registers or looks at are not known"
    ),
    "the layers it is loaded into are unknown": (
        "a loader that looks at bits, or registers what it loads into"
    ),
    "the engine dropped its tensor": (
        "a tensor that the loader registers is gone when its layer is loaded without it"
    ),
    "the engine keeps it nowhere, but": (
        "a full load is not exact, or not possible, for the sake of other tensors"
    ),
    "were not loaded": "a loader that wants all tensors at once, of which some have no group",
    "changed": "the loader adds up or alternates: only raw layers are loaded right",
    "no engine": "its loader raises as the engine starts",
    "a kernel is missing": "the engine's other way raises, and this one needs to be confirmed",
}


def unexplained(refused: Mapping[str, str]) -> dict[str, str]:
    return {n: why for n, why in refused.items() if not any(part in why for part in KNOWN)}
