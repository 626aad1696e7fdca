"""Changes to parts in the store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from deltachain.chain.chain import Chain
from deltachain.codec import Change, encode_part
from deltachain.codec.encodings import Encoding
from deltachain.codec.encodings.overwrite import OverwriteEncoding
from deltachain.delta import ABSOLUTE, STEP, TensorDelta
from deltachain.format.digest import digest_key
from deltachain.format.documents import Edge, ObjectRef
from deltachain.format.keys import PayloadKind, payload_key
from deltachain.kernels import host
from deltachain.kernels.reference import Changes
from deltachain.publish.model.layout import AdjacentRuns
from deltachain.publish.snapshot import digest_change, digest_window
from deltachain.types import Bits, TensorSpec, Version

DENSE_SHARE: Final = 0.7
"""What byte planes and zstd leave of dense bf16 weights (0.69 measured on trained ones)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeKeys:
    """Where the parts of one edge go."""

    kind: PayloadKind
    version: Version
    epoch: int
    commit_id: str


def upload(
    chain: Chain, slot: EdgeKeys, changes: Iterable[Change], *, raw: bool, part_nbytes: int
) -> Edge:
    """Encode changes in parts of bounded size, put each, and describe the edge they make.

    Nothing is visible to a follower until a manifest or an edge record names the parts.

    Raises:
        StoreError: A part could not be put.
    """
    refs: list[ObjectRef] = []
    encodings: set[str] = set()
    for number, group in enumerate(_parts(changes, part_nbytes)):
        key = payload_key(slot.kind, slot.version, slot.epoch, slot.commit_id, number)
        part = encode_part(group, raw=raw and not any(change.windows for change in group))
        pin = chain.store.put(key, part.data)
        encodings.update(part.encodings)
        refs.append(
            ObjectRef(
                key=key,
                nbytes=len(part.data),
                blake3=part.digest,
                directory=part.directory,
                pin=pin,
            )
        )
    base = slot.version - 1 if slot.kind == "delta" else None
    return Edge(kind=slot.kind, base=base, encodings=tuple(sorted(encodings)), parts=tuple(refs))


def _parts(changes: Iterable[Change], part_nbytes: int) -> Iterator[list[Change]]:
    """Cut where a part would be too large, or have a tensor twice; each in the table's order."""
    group: dict[str, Change] = {}
    nbytes = 0
    for change in changes:
        name = change.delta.spec.name
        if group and (nbytes + change.delta.nbytes > part_nbytes or name in group):
            yield [group[name] for name in sorted(group)]
            group, nbytes = {}, 0
        group[name] = change
        nbytes += change.delta.nbytes
    if group:
        yield [group[name] for name in sorted(group)]


def sparse_change(
    spec: TensorSpec, changes: Changes, bits: Bits | None, *, encoding: Encoding
) -> Change:
    """What goes on the wire for one tensor, the smaller: its changes, or all its bits.

    Args:
        spec: The tensor.
        changes: What changed.
        bits: All its bits after the change; ``None`` if other ranks hold some of them.
        encoding: How changes are written; steps give way to ``overwrite`` where it is smaller.
    """
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
    return Change(delta, digest_change(spec, changes), encoding=encoding)


def dense_change(spec: TensorSpec, bits: Bits) -> Change:
    """All the bits of one tensor."""
    return Change(TensorDelta.dense(spec, bits), host.digest(digest_key(spec), bits))


def window_change(window: AdjacentRuns, bits: Bits) -> Change:
    """The bits of a window, given all that the rank holds."""
    spec, indices = window.spec, window.indices
    digest = digest_window(window, bits)
    if isinstance(indices, range):
        if len(indices) == spec.numel:
            return Change(TensorDelta.dense(spec, bits[window.select]), digest)
        indices = np.arange(indices.start, indices.stop)
    mine = bits[window.select]
    delta = TensorDelta(spec=spec, indices=indices, values=mine, absolute=ABSOLUTE)
    return Change(delta, digest, windows=True)
