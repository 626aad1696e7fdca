"""Spools of given deltas, as a fetcher would have written them."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from deltachain.codec import ENCODINGS, Change, encode_part
from deltachain.codec.encode import EncodedPart
from deltachain.delta import ABSOLUTE, STEP, OldBits, TensorDelta
from deltachain.format.documents import ObjectRef
from deltachain.replica.spool import Spool, SpooledObject, SpoolIndex
from deltachain.types import Bits, StateDigest


def spool_of(
    parent: Path,
    *edges: Iterable[TensorDelta],
    from_nothing: bool = False,
    old: Callable[[str], Bits] | None = None,
) -> Spool:
    """Write the deltas of each edge of a plan into a new spool, as one object an edge."""
    plan: list[Sequence[TensorDelta]] = []
    for edge in edges:
        absolute, steps = _split(edge)
        plan += [deltas for deltas in (absolute, steps) if deltas] or [()]
    parts = [encode_part(_change(delta, old) for delta in deltas) for deltas in plan]
    objects = tuple(
        SpooledObject(
            ref=ObjectRef(
                key=f"deltas/{number}/0.safetensors",
                nbytes=len(part.data),
                blake3=part.digest,
                directory=part.directory,
            ),
            edge=number,
        )
        for number, part in enumerate(parts)
    )
    spool = Spool.create(parent, SpoolIndex(from_nothing=from_nothing, objects=objects))
    for number, part in enumerate(parts):
        spool.put(number, part.data)
    return spool


def _change(delta: TensorDelta, old: Callable[[str], Bits] | None) -> Change:
    if old is None:
        return Change(delta, StateDigest())
    before = partial(OldBits, old(delta.spec.name))
    return Change(delta, StateDigest(), encoding=ENCODINGS.get("max"), old=before)


def _split(deltas: Iterable[TensorDelta]) -> tuple[Sequence[TensorDelta], Sequence[TensorDelta]]:
    absolute: list[TensorDelta] = []
    rest: list[TensorDelta] = []
    for delta in deltas:
        if delta.indices is None or not delta.absolute.ndim:
            rest.append(delta)
            continue
        for mask, kind, group in (
            (delta.absolute, ABSOLUTE, absolute),
            (~delta.absolute, STEP, rest),
        ):
            at = np.flatnonzero(mask)
            group.append(
                TensorDelta(
                    spec=delta.spec,
                    indices=delta.indices[at],
                    values=delta.values[at],
                    absolute=kind,
                )
            )
    return absolute, rest


def spool_of_parts(
    parent: Path,
    parts: Sequence[EncodedPart],
    *,
    edges: Sequence[int] = (),
    from_nothing: bool = False,
) -> Spool:
    """A spool of these objects, none of which has arrived; of one edge unless others are named."""
    objects = tuple(
        SpooledObject(
            ref=ObjectRef(
                key=f"deltas/{number}",
                nbytes=len(part.data),
                blake3=part.digest,
                directory=part.directory,
            ),
            edge=edge,
        )
        for number, (part, edge) in enumerate(zip(parts, edges or [0] * len(parts), strict=True))
    )
    return Spool.create(parent, SpoolIndex(from_nothing=from_nothing, objects=objects))
