"""TRL's delta weight sync: ``anchors/step_000001.safetensors``, ``deltas/step_000002.safetensors``.

Deltas have the new bits of changed elements, and as positions gaps (branches delta-weight-sync-v2
and -v3 of its pull requests 5932 and 5937), or indices (-sync, 5417). All tensors are bf16. Files
have no checksum: an import that finds the file before written anew compares it with the chain.
"""

import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from deltachain.bridges import files
from deltachain.bridges.dialect import Dialect, ElementChange, HostModel, Objects, required
from deltachain.delta import ABSOLUTE, TensorDelta
from deltachain.errors import MalformedError, UnsupportedFormatError, UnsupportedModelError
from deltachain.store import Store
from deltachain.types import WIRE_DTYPES, Bits, Indices, TensorSpec

_FORMAT: Final = {"format": "sparse_weight_patch", "version": "1"}
_MOST: Final = 1 << 31  # elements: positions are int32 at their receivers


def gaps_of(indices: Indices) -> Indices:
    return np.diff(indices, prepend=-1) - 1


def indices_of(gaps: npt.NDArray[Any]) -> Indices:
    return np.cumsum(gaps, dtype=np.int64) + np.arange(gaps.size)


class TRLDialect(Dialect):
    """``absolute``: deltas have indices instead of gaps."""

    shares_folders = True
    proves_base = False

    def __init__(self, *, absolute: bool = False) -> None:
        self.absolute = absolute

    def number(self, key: str) -> int | None:
        found = re.fullmatch(r"(?:anchors|deltas)/step_(\d{6,12})\.safetensors", key)
        return int(found[1]) if found else None

    def full(self, number: int, model: HostModel) -> Objects:
        for spec in model.specs.values():
            if spec.dtype != "BF16" or spec.numel >= _MOST:
                raise UnsupportedModelError(
                    f"{spec.name!r} is {spec.dtype}{list(spec.shape)}: TRL's files have bf16 "
                    f"tensors of less than {_MOST} elements",
                    hint="choose another dialect, or, of floats, publish with dtype='BF16'",
                )
        arrays = (
            files.Array(s.name, s.dtype, model.bits(s.name), s.shape) for s in model.specs.values()
        )
        total = sum(spec.numel for spec in model.specs.values())
        metadata = self._metadata(number, len(model.specs), total, total, sparse=False)
        if self.absolute:
            metadata["changed_params"] = json.dumps(list(model.specs))
        yield f"anchors/step_{number:06d}.safetensors", files.packed(arrays, metadata)

    def delta(self, number: int, model: HostModel, changes: Sequence[ElementChange]) -> Objects:
        del model
        yield f"deltas/step_{number:06d}.safetensors", self.file(number, changes)

    def file(self, number: int, changes: Sequence[ElementChange]) -> bytes:
        """Return the file of some changes; a tensor without any has two empty arrays."""
        arrays = []
        for change in changes:
            name = change.spec.name
            if self.absolute:
                arrays.append(files.Array(f"{name}.indices", "I32", change.indices.astype("<i4")))
                arrays.append(files.Array(f"{name}.values", "BF16", change.new))
                continue
            gaps = gaps_of(change.indices)
            dtype = "U32" if np.any(gaps > 0xFFFF) else "U16"
            stored = gaps.astype(f"<u{WIRE_DTYPES[dtype]}")
            arrays.append(files.Array(f"{name}.idx", dtype, stored))
            arrays.append(files.Array(f"{name}.val", "BF16", change.new))
        nnz = sum(change.indices.size for change in changes)
        total = sum(change.spec.numel for change in changes)
        metadata = self._metadata(number, len(changes), nnz, total, sparse=True)
        if self.absolute:
            metadata["changed_params"] = json.dumps([change.spec.name for change in changes])
        return files.packed(arrays, metadata)

    def _metadata(
        self, number: int, tensors: int, nnz: int, numel: int, *, sparse: bool
    ) -> dict[str, str]:
        return {
            **_FORMAT,
            "sparse": str(sparse),
            "model_version": str(number),
            "num_changed_params": str(tensors),
            "total_changed_elements": str(nnz),
            "total_elements": str(numel),
            "sparsity": str(1.0 - nnz / max(numel, 1)),
        } | ({} if self.absolute else {"encoding": "gap_delta"})

    def is_full(self, store: Store, key: str) -> bool:
        del store
        return key.startswith("anchors/")

    def read(self, store: Store, key: str, before: HostModel | None) -> HostModel:
        file = files.TensorFile.open(store, key)
        said, full = file.header.metadata, self.is_full(store, key)
        expected = _FORMAT | {"sparse": str(not full), "model_version": str(self.number(key))}
        found = {name: said.get(name) for name in expected}
        if found != expected:
            raise MalformedError(f"{key}: expected {expected}, found {found}", key=key)
        if full:
            return files.read_tensors(file)
        old = required(before, key)
        position, value = (".idx", ".val") if "encoding" in said else (".indices", ".values")
        names = [name.removesuffix(value) for name in file.header.entries if name.endswith(value)]
        if {f"{name}{end}" for name in names for end in (position, value)} != {
            *file.header.entries
        }:
            raise MalformedError(f"{key}: expected pairs of {position} and {value}", key=key)

        def new(spec: TensorSpec) -> Bits:
            where = file.entry(f"{spec.name}{position}")
            values = file.entry(f"{spec.name}{value}", spec.dtype)
            if values.nbytes > spec.nbytes:
                raise MalformedError(f"{key}: {spec.name!r} has more values than elements", key=key)
            indices = _indices(file.read(where), where.dtype, said.get("encoding", "raw"), key)
            changed = TensorDelta(
                spec=spec, indices=indices, values=file.read(values), absolute=ABSOLUTE
            )
            whole = old.bits(spec.name).copy()
            whole[indices] = changed.validate().values
            return whole

        return old.changed({name: partial(new, old.spec(name, key)) for name in names})


def _indices(stored: npt.NDArray[Any], dtype: str, encoding: str, key: str) -> Indices:
    if encoding == "raw" and dtype == "I32":
        return stored.view("<i4").astype(np.int64)
    if encoding == "gap_delta" and dtype in ("U16", "U32"):
        return indices_of(stored)
    raise UnsupportedFormatError(
        f"{key}: positions as {encoding!r} in {dtype}",
        key=key,
        hint="known are raw in I32 and gap_delta in U16 or U32: set the encoding of the trainer",
    )
