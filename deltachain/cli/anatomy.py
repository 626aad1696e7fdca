"""Statistics of the parts of an edge: encodings, streams, densities and step magnitudes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from deltachain.cli.console import bits_per_change
from deltachain.codec import ENCODINGS, Part
from deltachain.codec import container as d
from deltachain.types import Bits

DENSITIES: Final = (
    (0.1, "10 % or more"),
    (0.01, "1 to 10 %"),
    (0.001, "0.1 to 1 %"),
    (0.0001, "0.01 to 0.1 %"),
    (0.0, "less"),
)
"""Classes of tensor density by lower bound, densest first."""

MAGNITUDES: Final = ((1, "1"), (2, "2"), (7, "3 to 7"), (31, "8 to 31"), (254, "32 to 254"))
"""Classes of step magnitude by upper bound; larger magnitudes need more than a byte."""

BEYOND: Final = "255 or more"


def dissect(parts: Sequence[Part], sizes: Sequence[int]) -> dict[str, Any]:
    """Verify the parts of an edge and compute their statistics.

    Args:
        parts: The opened parts.
        sizes: Size of each part, in bytes.
    """
    for part in parts:
        part.verify()
    rows = [row for part in parts for row in part.rows.values()]
    streams = [row for part in parts for row in part.directory.streams]
    nnz = sum(row.nnz for row in rows)
    stored = sum(sum(row.stored) for row in streams)
    return {
        "nbytes": sum(sizes),
        "parts": len(parts),
        "tensors": len(rows),
        "nnz": nnz,
        "numel": sum(row.spec.numel for row in rows),
        "bits_per_change": bits_per_change(sum(sizes), nnz),
        "directory_nbytes": sum(sizes) - stored,
        "segments": sum(len(part.directory.segments.start) for part in parts),
        "frames": sum(len(row.stored) for row in streams),
        "encodings": _encodings(rows),
        "streams": _streams(parts, nnz),
        "densities": _densities(rows),
        "magnitudes": _magnitudes(parts),
        "rows": [_row(row) for row in sorted(rows, key=lambda r: (-r.nnz, r.name))],
    }


def _row(row: d.TensorRow) -> dict[str, Any]:
    numel = row.spec.numel
    return {
        "name": row.name,
        "dtype": row.dtype,
        "shape": list(row.shape),
        "encoding": row.encoding,
        "nnz": row.nnz,
        "numel": numel,
        "density": row.nnz / numel if numel else 0.0,
        "digest": row.digest or None,
    }


def _encodings(rows: Iterable[d.TensorRow]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        entry = found.setdefault(row.encoding, {"tensors": 0, "nnz": 0})
        entry["tensors"] += 1
        entry["nnz"] += row.nnz
    return found


def _streams(parts: Iterable[Part], nnz: int) -> dict[str, dict[str, Any]]:
    """Sum bytes by kind of stream, over all buckets and tensors."""
    raw: Counter[str] = Counter()
    stored: Counter[str] = Counter()
    for part in parts:
        for row in part.directory.streams:
            kind = _kind(row.name, part)
            raw[kind] += sum(row.raw)
            stored[kind] += sum(row.stored)
    return {
        kind: {
            "raw": raw[kind],
            "stored": stored[kind],
            "bits_per_change": bits_per_change(stored[kind], nnz),
        }
        for kind, _ in stored.most_common()
    }


def _kind(stream: str, part: Part) -> str:
    if part.compressed:
        return stream.partition(".")[2]
    whole = part.rows.get(stream)
    if whole is not None and not ENCODINGS.get(whole.encoding).sparse:
        return whole.encoding
    return stream.rpartition(".")[2]


def _densities(rows: Iterable[d.TensorRow]) -> dict[str, int]:
    """Count tensors by class of density; dense tensors have a class of their own."""
    found = dict.fromkeys(("whole", *(label for _, label in DENSITIES)), 0)
    for row in rows:
        share = row.nnz / row.spec.numel if row.spec.numel else 0.0
        sparse = ENCODINGS.get(row.encoding).sparse
        label = next(label for bound, label in DENSITIES if share >= bound) if sparse else "whole"
        found[label] += 1
    return found


def _magnitudes(parts: Iterable[Part]) -> dict[str, int]:
    """Count changed elements by class of magnitude, for tensors encoded as steps."""
    labels = (*(label for _, label in MAGNITUDES), BEYOND)
    counts = np.zeros(len(labels), np.int64)
    for part in parts:
        for name, row in part.rows.items():
            if not ENCODINGS.get(row.encoding).absolute and not part.needs_old(name):
                counts += _classes(part.read(name).values, len(labels))
    return dict(zip(labels, counts.tolist(), strict=True)) if counts.any() else {}


def _classes(steps: Bits, classes: int) -> npt.NDArray[np.int64]:
    """Count the steps of a segment by class."""
    bounds = np.array([bound for bound, _ in MAGNITUDES], np.uint64)
    counts = np.zeros(classes, np.int64)
    for at in range(0, steps.size, d.SEGMENT):
        piece = steps[at : at + d.SEGMENT]
        magnitudes = np.minimum(piece, -piece).astype(np.uint64)
        counts += np.bincount(np.searchsorted(bounds, magnitudes), minlength=classes)
    return counts
