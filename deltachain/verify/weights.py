"""Weights of a chain during verification, and the proof of each edge that starts from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from deltachain.chain.fetch import Fetched
from deltachain.codec import ENCODINGS
from deltachain.codec.directory import TensorRow
from deltachain.codec.old_bits import OldBits
from deltachain.codec.row_digests import RowDigests
from deltachain.delta import TensorDelta, fold_all
from deltachain.errors import BrokenChainError, MalformedError
from deltachain.format import keys
from deltachain.kernels.move import Move, move, write_
from deltachain.types import Bits, StateDigest, TensorSpec
from deltachain.verify.documents import another

_Row: TypeAlias = tuple[RowDigests | None, TensorRow | None, TensorDelta]
"""A row of a part, with the digests of that part, and its delta; ``None`` for a base checkpoint."""


def counted(moved: Move[Any], row: TensorRow) -> StateDigest:
    """Return the digest of a move as the row of its encoding states it."""
    return moved.change if ENCODINGS.get(row.encoding).sparse else moved.added


@dataclass(slots=True)
class Weights:
    """Bits of all tensors, and their contributions to the state digest.

    Attributes:
        specs: Specs of all tensors, by name.
        bits: Flat bits by tensor name, updated in place.
        digests: Contributions to the state digest, by tensor name.
    """

    specs: Mapping[str, TensorSpec]
    bits: dict[str, Bits] = field(default_factory=dict)
    digests: dict[str, StateDigest] = field(default_factory=dict)

    @property
    def state(self) -> StateDigest:
        """State digest of all tensors."""
        return sum(self.digests.values(), StateDigest())

    def prove(self, fetched: Fetched, expected: StateDigest, *, write: bool) -> None:
        """Verify that an edge from these weights, or from nothing, leads to a state.

        Raises:
            BrokenChainError: The edge starts from nothing and does not contain every tensor whole.
            DigestMismatchError: The edge leads to another state, or a row contradicts its digest.
        """
        edge = fetched.plan.edges[0]
        key = edge.record or keys.manifest_key(edge.version)
        after = {} if edge.base is None else dict(self.digests)
        for name, rows in _rows(fetched, self.bits):
            delta = fold_all(given for *_, given in rows)
            if delta.nnz < sum(given.nnz for *_, given in rows):
                raise MalformedError(f"{key}: gives elements of {name!r} twice", key=key)
            if not delta.is_dense and name not in after:
                raise BrokenChainError(f"{key}: does not give all of {name!r}")
            total = _moved(self.bits.get(name, delta.values), delta, rows, key)
            after[name] = total.added if delta.is_dense else after[name] + total.change
            if write:
                self._write(delta, total)
        if absent := self.specs.keys() - after.keys():
            raise BrokenChainError(f"{key}: does not give {min(absent)!r}", version=edge.version)
        actual = sum(after.values(), StateDigest())
        if actual != expected:
            what = f"{key}: the {edge.kind} leads to another state than version {edge.version}"
            raise another(what, expected, actual, key=key)
        if write:
            self.digests = after

    def _write(self, delta: TensorDelta, moved: Move[Any]) -> None:
        if delta.is_dense:
            self.bits[delta.spec.name] = np.array(delta.values)
        else:
            write_(self.bits[delta.spec.name], delta.indices, moved.new)


def _moved(old: Bits, delta: TensorDelta, rows: Sequence[_Row], key: str) -> Move[Any]:
    """Compute the effect of an edge on a tensor; compare each row with its digest."""
    moved = [move(old, given) for *_, given in rows]
    for (digests, row, _), one in zip(rows, moved, strict=True):
        if digests is None or row is None:
            continue
        found = digests.add(row.name, counted(one, row))
        if found is not None and found.actual != found.expected:
            raise another(f"{key}: {digests.named(row.name)}", *found, key=key)
    return moved[0] if len(rows) == 1 else move(old, delta)


def _rows(fetched: Fetched, bits: Mapping[str, Bits]) -> Iterator[tuple[str, list[_Row]]]:
    """Yield all rows of one edge by tensor; ranks may store windows of one tensor each."""
    if fetched.base is not None:
        for name, spec in fetched.specs.items():
            yield name, [(None, None, TensorDelta.dense(spec, fetched.base.bits(name)))]
    else:
        all_parts = [(RowDigests(part.rows.values()), part) for part in fetched.parts]
        for name in fetched.names:
            parts = [(digests, part) for digests, part in all_parts if name in part.rows]
            old = OldBits(bits[name]) if name in bits else None
            yield name, [(some, part.rows[name], part.read(name, old=old)) for some, part in parts]
