"""Encoding and upload of the parts of an edge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from deltachain.codec import Change, encode_part
from deltachain.codec.encodings import Encoding
from deltachain.codec.encodings.overwrite import OverwriteEncoding
from deltachain.delta import ABSOLUTE, STEP, TensorDelta
from deltachain.format.digest import digest_key
from deltachain.format.documents import Edge, ObjectRef
from deltachain.format.keys import PayloadKind, payload_key
from deltachain.kernels import host
from deltachain.publish.diff import CheckpointChanges
from deltachain.publish.model.layout import AdjacentRuns
from deltachain.publish.snapshot import digest_window
from deltachain.store import Store
from deltachain.types import Bits, TensorSpec, Version

DENSE_SHARE: Final = 0.7
"""Compression ratio of dense bf16 weights by byte planes and zstd; 0.69 on trained weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeKeys:
    """Unique names of the parts of one rank in one attempt."""

    kind: PayloadKind
    version: Version
    epoch: int
    commit_id: str


class EdgeUpload:
    """Encoder and uploader of an edge's changes, in parts of bounded size.

    Parts are invisible to followers until a manifest or an edge record names them.

    Args:
        store: Store of the parts.
        keys: Names of the parts.
        raw: Whether the parts are readable by any safetensors reader.
        part_nbytes: Largest size of the changes in a part before compression, in bytes.
    """

    def __init__(self, store: Store, keys: EdgeKeys, *, raw: bool, part_nbytes: int) -> None:
        self._store, self._keys = store, keys
        self._raw, self._part_nbytes = raw, part_nbytes
        self._group: dict[str, Change] = {}
        self._nbytes = 0
        self._parts: list[ObjectRef] = []
        self._encodings: set[str] = set()

    def add(self, change: Change) -> None:
        """Add a change; first upload the current part if it is full or contains the same tensor.

        Raises:
            StoreError: A part could not be uploaded.
        """
        name, nbytes = change.delta.spec.name, change.delta.nbytes
        if self._group and (self._nbytes + nbytes > self._part_nbytes or name in self._group):
            self._put()
        self._group[name] = change
        self._nbytes += nbytes

    def finish(self) -> Edge:
        """Upload the last part; return the edge.

        Raises:
            StoreError: The part could not be uploaded.
        """
        if self._group:
            self._put()
        kind, version = self._keys.kind, self._keys.version
        return Edge(
            kind=kind,
            base=version - 1 if kind == "delta" else None,
            encodings=tuple(sorted(self._encodings)),
            parts=tuple(self._parts),
        )

    def _put(self) -> None:
        keys = self._keys
        key = payload_key(keys.kind, keys.version, keys.epoch, keys.commit_id, len(self._parts))
        group = [self._group[name] for name in sorted(self._group)]  # the order of the table
        part = encode_part(group, raw=self._raw and not any(change.windows for change in group))
        pin = self._store.put(key, part.content)
        self._encodings.update(part.encodings)
        self._parts.append(
            ObjectRef(
                key=key,
                nbytes=len(part.content),
                blake3=part.digest,
                directory=part.directory,
                pin=pin,
            )
        )
        self._group, self._nbytes = {}, 0


def sparse_change(found: CheckpointChanges, bits: Bits | None, *, encoding: Encoding) -> Change:
    """Return the smaller wire form of a changed tensor: its changes, or all its bits.

    Args:
        found: Changes of the tensor.
        bits: All bits of the tensor after the change; ``None`` if other ranks have some of them.
        encoding: Encoding of changes; ``overwrite`` replaces ``step`` if smaller.
    """
    spec, changes = found.spec, found.changes
    nbytes, overwrite = encoding.estimate(spec, changes), OverwriteEncoding()
    if bits is not None and nbytes > DENSE_SHARE * spec.nbytes:
        return dense_change(spec, bits)
    if not encoding.absolute and nbytes > overwrite.estimate(spec, changes):
        encoding = overwrite
    delta = TensorDelta(
        spec=spec,
        indices=changes.indices,
        values=changes.new if encoding.absolute else changes.new - changes.old,
        absolute=ABSOLUTE if encoding.absolute else STEP,
    )
    return Change(delta, found.digest, encoding=encoding)


def dense_change(spec: TensorSpec, bits: Bits) -> Change:
    """Return a change of all bits of one tensor."""
    return Change(TensorDelta.dense(spec, bits), host.digest(digest_key(spec), bits))


def window_change(window: AdjacentRuns, bits: Bits) -> Change:
    """Return a change of a window; ``bits`` is the rank's whole shard of the tensor."""
    spec, indices = window.spec, window.indices
    digest = digest_window(window, bits)
    if isinstance(indices, range):
        if len(indices) == spec.numel:
            return Change(TensorDelta.dense(spec, bits[window.select]), digest)
        indices = np.arange(indices.start, indices.stop)
    mine = bits[window.select]
    delta = TensorDelta(spec=spec, indices=indices, values=mine, absolute=ABSOLUTE)
    return Change(delta, digest, windows=True)
