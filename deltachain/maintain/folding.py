"""Folding: the edges of a plan as the changes of one edge."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from deltachain.chain.fetch import Fetched
from deltachain.codec import ENCODINGS, Change
from deltachain.codec.directory import TensorRow
from deltachain.codec.row_digests import own_digests
from deltachain.delta import TensorDelta
from deltachain.format.digest import digest_key
from deltachain.kernels import host
from deltachain.kernels.move import digest_change
from deltachain.types import Bits, StateDigest

OldBitsOf = Callable[[str], Bits]
"""Function that reads all bits of a tensor before a plan."""


def folded(fetched: Fetched, old: OldBitsOf) -> Iterator[Change]:
    """Yield one change of each tensor that a plan changes, in the order of the table.

    Steps and dense bits are folded without the weights. Where a plan mixes steps with absolute
    bits, sets a part of a tensor, or has an encoding that needs old bits, ``old`` is called.

    Args:
        fetched: A plan, fetched.
        old: Function that reads all bits of a tensor before the plan.

    Raises:
        FormatError: An object cannot be decoded.
    """
    digests = [own_digests(part.rows.values()) for part in fetched.parts]
    for name in fetched.names:
        rows = [
            (part.rows[name], own.get(name))
            for part, own in zip(fetched.parts, digests, strict=True)
            if name in part.rows
        ]
        change = _folded(fetched, name, rows, old)
        if change is not None:
            yield change


def _folded(
    fetched: Fetched,
    name: str,
    rows: Sequence[tuple[TensorRow, StateDigest | None]],
    old: OldBitsOf,
) -> Change | None:
    delta = fetched.read(name, old=lambda: old(name))
    if not delta.nnz:
        return None
    if delta.is_dense:
        return Change(delta, host.digest(digest_key(delta.spec), delta.values))
    steps = not delta.absolute.any()
    changes = [change for row, change in rows if change is not None and _is_sparse(row)]
    if len(changes) == len(rows) and (steps or delta.absolute.all()):
        return Change(delta, sum(changes, StateDigest()))
    return _steps(delta, old(name))


def _is_sparse(row: TensorRow) -> bool:
    return ENCODINGS.get(row.encoding).sparse


def _steps(delta: TensorDelta, old: Bits) -> Change | None:
    """Return a delta as steps from old bits; ``None`` if nothing changes."""
    indices = delta.indices
    before = old[delta.start : delta.start + delta.nnz] if indices is None else old[indices]
    after = delta.new_bits(before)
    moved = (after != before).nonzero()[0]
    if not moved.size:
        return None
    places = moved + delta.start if indices is None else indices[moved]
    before, after = before[moved], after[moved]
    steps = TensorDelta(spec=delta.spec, indices=places, values=after - before)
    return Change(steps, digest_change(delta.spec, places, before, after))
