"""Measurements of a chain, common to both demos."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainFigures:
    """Measurements of the chain that a demo published.

    Attributes:
        versions: Number of versions, version 0 included.
        mismatching_bits: Number of different bits over all comparisons.
        bytes_sent: Size of all deltas, in bytes.
        anchor_bytes: Size of all anchors, in bytes.
        bytes_dense: Size of full bf16 copies of the same versions, in bytes.
        late_joiner_bytes: Bytes fetched by a follower that joins at the end.
        late_joiner_plan: Plan of this follower.
        verified: Whether ``deltachain verify`` passed.
        seconds: Duration of the demo.
        parameters: Number of elements of the model.
    """

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
        """Return all fields in JSON types."""
        return asdict(self)
