"""Rows of the codec benchmark: what was measured of one update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingRow:
    """One encoding of one update; speeds in dense gigabytes, or by changed element.

    ``nbytes`` is the part; ``bits`` counts the part and its manifest.
    """

    encoding: str
    nbytes: int
    bits: float
    encode_gb_per_s: float
    decode_gb_per_s: float
    encode_ns: float
    decode_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRow:
    """One layout of another system for one update, by changed element; times where measured."""

    layout: str
    nbytes: int
    bits: float
    encode_ns: float | None
    decode_ns: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainRow:
    """One update of one chain.

    Attributes:
        label: How the update was chosen.
        lr: Learning rate.
        dtype: Wire dtype of the weights or codes.
        density: Changed over all elements.
        numel: Number of elements of the model.
        nnz: Number of changed elements.
        dense_nbytes: Size of all elements, in bytes.
        manifest_nbytes: Size of the manifest with a full window of recent edges, in bytes.
        encodings: Figures of deltachain's encodings.
        layouts: Figures of other systems' layouts, by name; of those that can store it.
        full_copy: Figures of all elements as they are; encoding and decoding are a copy each.
        limits: Entropy limits in bits a change, by name.
    """

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
        """Whether speeds of other systems' layouts were measured."""
        return self.full_copy.encode_ns is not None
