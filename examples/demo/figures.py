"""Measurements of a chain, common to both demos."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainFigures:
    """Measurements of the chain that a demo published."""

    versions: int
    mismatching_bits: int
    bytes_sent: int
    anchor_bytes: int
    bytes_dense: int
    late_joiner_bytes: int
    late_joiner_plan: str
    verified: bool
    seconds: float
    parameters: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
