"""Layers that engines compute as one: quantised together, or not at all."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from deltachain.errors import ConfigError

FUSED: Final = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
"""Names of layers of one module that vLLM and SGLang load into one matrix."""

_EXPERT: Final = re.compile(r"(.*\bexperts)\.\d+\..+")
"""Name of a layer of an expert: all experts of a module are one layer of engines."""


def check_fused(quantised: Iterable[str], left: Iterable[str]) -> None:
    """Refuse layers of which engines compute some as one, and only a part is quantised.

    Args:
        quantised: Names of the layers that are quantised.
        left: Names of the other linear layers and experts.

    Raises:
        ConfigError: Engines would refuse the checkpoint, or load it wrongly.
    """
    groups: dict[str, str] = {}
    for layer in quantised:
        groups.setdefault(_group(layer), layer)
    parts: dict[str, list[str]] = defaultdict(list)
    for layer in sorted(left):
        parts[_group(layer)].append(layer)
    for group, layers in parts.items():
        if group in groups:
            raise ConfigError(
                f"{layers[0]!r} is ignored, {groups[group]!r} is quantised, and vLLM and SGLang "
                f"compute both as one layer, {group}",
                hint="ignore all layers of it, or none",
            )


def computed_with(layer: str) -> str:
    """Return a name of the layers of a module that engines load into one matrix with a layer.

    Layers of several modules, as experts are, have several names.
    """
    parent, dot, name = layer.rpartition(".")
    fused = next((names for names in FUSED if name in names), (name,))
    return f"{parent}{dot}{'+'.join(fused)}"


def _group(layer: str) -> str:
    """Return a name of the layer of an engine that a layer of the checkpoint is in."""
    expert = _EXPERT.fullmatch(layer)
    return expert[1] if expert else computed_with(layer)
