"""Rows of the codec benchmark: what was measured of one update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingRow:
    encoding: str
    nbytes: int
    bits: float
    encode_gb_per_s: float
    decode_gb_per_s: float
    encode_ns: float
    decode_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRow:
    layout: str
    nbytes: int
    bits: float
    encode_ns: float | None
    decode_ns: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainRow:
    label: str
    lr: float
    dtype: str
    density: float
    numel: int
    nnz: int
    dense_nbytes: int
    manifest_nbytes: int
    encodings: Sequence[EncodingRow]
    layouts: Mapping[str, LayoutRow]
    full_copy: LayoutRow
    limits: Mapping[str, float]

    @property
    def timed(self) -> bool:
        return self.full_copy.encode_ns is not None
