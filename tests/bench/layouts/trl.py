"""Layouts of TRL's drafts: indices or gaps, and new bf16 bits, in a safetensors file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tests.bench.changes import ChangedTensors, count
from tests.bench.layouts.layout import (
    DecodedWrite,
    Objects,
    PeerLayout,
    Specs,
    gaps_of,
    indices_of,
)
from tests.bench.layouts.safetensors_file import StoredArray, dump, load


def encode_indices(changes: ChangedTensors) -> Objects:
    """TRL's first draft: ``{name}.indices`` int32 and ``{name}.values`` bf16, not compressed.

    48 bits a change and a safetensors header. Source: TRL PR 5417, branch delta-weight-sync
    d6504b7, the whole file including its metadata.
    """
    arrays = []
    for name, change in changes.items():
        arrays.append(StoredArray(f"{name}.indices", "I32", change.indices.astype("<i4")))
        arrays.append(StoredArray(f"{name}.values", "BF16", change.new))
    extra = {"changed_params": json.dumps(list(changes))}
    return (dump(arrays, _metadata(changes) | extra),)


def decode_indices(objects: Objects, specs: Specs) -> Iterator[tuple[str, DecodedWrite]]:
    arrays = load(objects[0])
    for name in specs:
        indices = np.frombuffer(arrays[f"{name}.indices"], "<i4")
        values = np.frombuffer(arrays[f"{name}.values"], "<u2")
        yield name, DecodedWrite(indices, values, xor=False)


def encode_gaps(changes: ChangedTensors) -> Objects:
    """TRL's later drafts: gaps as uint16, or uint32 where one does not fit, and bf16 values.

    32 bits a change and a safetensors header. Source: TRL PRs 5932 and 5937 (encoding
    ``gap_delta``), branches delta-weight-sync-v2 3253247 and -v3 aa9adc3, the whole file.
    """
    arrays = []
    for name, change in changes.items():
        gaps = gaps_of(change.indices)
        wide = bool(np.any(gaps > 0xFFFF))
        stored = gaps.astype("<u4" if wide else "<u2")
        arrays.append(StoredArray(f"{name}.idx", "U32" if wide else "U16", stored))
        arrays.append(StoredArray(f"{name}.val", "BF16", change.new))
    return (dump(arrays, _metadata(changes) | {"encoding": "gap_delta"}),)


def decode_gaps(objects: Objects, specs: Specs) -> Iterator[tuple[str, DecodedWrite]]:
    arrays = load(objects[0])
    for name in specs:
        values = np.frombuffer(arrays[f"{name}.val"], "<u2")
        wide = len(arrays[f"{name}.idx"]) > values.nbytes
        gaps: npt.NDArray[Any] = np.frombuffer(arrays[f"{name}.idx"], "<u4" if wide else "<u2")
        yield name, DecodedWrite(indices_of(gaps), values, xor=False)


def _metadata(changes: ChangedTensors) -> dict[str, str]:
    nnz = count(changes)
    numel = sum(change.numel for change in changes.values())
    return {
        "format": "sparse_weight_patch",
        "version": "1",
        "sparse": "True",
        "model_version": "2",
        "num_changed_params": str(len(changes)),
        "total_changed_elements": str(nnz),
        "total_elements": str(numel),
        "sparsity": repr(1 - nnz / numel),
    }


TRL_V1: Final = PeerLayout(
    name="TRL v1: int32 + bf16", encode=encode_indices, decode=decode_indices
)
TRL_GAPS: Final = PeerLayout(
    name="TRL v2/v3: u16 gap + bf16", encode=encode_gaps, decode=decode_gaps
)
