"""Edges that a maintainer adds to committed versions: skips and anchors."""

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from deltachain.chain.chain import Chain, Committed, check_write_access, plan_present
from deltachain.chain.checks import read_summary
from deltachain.chain.fetch import Fetched, fetching, scratch
from deltachain.chain.plan import Plan
from deltachain.chain.upload import EdgeKeys, EdgeUpload, anchor_part_nbytes
from deltachain.codec import ENCODINGS, Change
from deltachain.codec.container import TensorRow
from deltachain.codec.rows import own_digests
from deltachain.delta import TensorDelta, pieces
from deltachain.errors import BrokenChainError, ChainError, DigestMismatchError
from deltachain.format.documents import Edge, EdgeKind, EdgeSummary
from deltachain.format.keys import PayloadKind, digest_key, edge_key
from deltachain.kernels import host
from deltachain.kernels.protocol import digest_change
from deltachain.store import Store
from deltachain.types import Bits, StateDigest, Version


def folded(fetched: Fetched, old: Callable[[str], Bits]) -> Iterator[Change]:
    """Yield one change of each tensor that a plan changes, in the order of the table.

    Steps and dense bits are folded without the weights. Where a plan mixes steps with absolute
    bits, sets a part of a tensor, or has an encoding that needs them, ``old`` is called: it reads
    all bits of a tensor before the plan.
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
    old: Callable[[str], Bits],
) -> Change | None:
    delta = fetched.read(name, old=lambda: old(name))
    if not delta.nnz:
        return None
    if delta.is_dense:
        return Change(delta, host.digest(digest_key(delta.spec), delta.values))
    steps = not delta.absolute.any()
    changes = [
        change for row, change in rows if change is not None and ENCODINGS.get(row.encoding).sparse
    ]
    if len(changes) == len(rows) and (steps or delta.absolute.all()):
        return Change(delta, sum(changes, StateDigest()))
    return _steps(delta, old(name))


def _steps(delta: TensorDelta, old: Bits) -> Change | None:
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


PART_NBYTES: Final = 64 << 20  # largest size of changes in one part before compression, in bytes


def add_skip(
    chain: Chain, start: Committed, plan: Plan, target: Committed, *, base: Path | None = None
) -> EdgeSummary:
    """Fold a plan into a skip, prove it, and record it; an existing record is kept."""
    _refuse_pruned(chain, target, start.version)
    with ExitStack() as reading:
        fetched = reading.enter_context(fetching(chain, plan, room=scratch()))
        before = _BitsAt(chain, start, base, reading)
        changes = _proven(folded(fetched, before.read), start, target)
        edge = _upload(chain.store, "skip", target, changes, PART_NBYTES)
    edge = replace(edge, base=start.version)
    return chain.add_edge(target, edge, base_state=start.manifest.state)


def add_anchor(chain: Chain, target: Committed, *, base: Path | None = None) -> EdgeSummary:
    """Rebuild a version from nothing, prove it, and record it as an anchor.

    An anchor that is recorded already is returned as it is.
    """
    _refuse_pruned(chain, target, None)
    known = recorded_anchor(chain, target)
    if known is not None:
        return known
    plan = plan_present(chain, None, target)
    with fetching(chain, plan, target=target, base=base, hold=False, room=scratch()) as fetched:
        check_write_access(chain)
        _refuse_closed(chain, target)
        limit = anchor_part_nbytes(sum(s.nbytes for s in chain.table.specs()), PART_NBYTES)
        edge = _upload(chain.store, "anchor", target, _whole(chain, fetched, target), limit)
        return chain.add_edge(target, edge, base_state="")


def recorded_anchor(chain: Chain, target: Committed) -> EdgeSummary | None:
    """Return the anchor that is recorded for a version; ``None`` if there is none to rely on."""
    key = edge_key(target.version, "anchor", None)
    known = read_summary(chain.store, key, chain=chain.identity.chain, trust=chain.trust)
    if known is None:
        return None
    parts = [part.key for part in chain.edge(known, target).parts]
    if len(chain.store.find_all(parts)) == len(parts):
        return known
    raise BrokenChainError(
        f"the anchor of version {target.version} was recorded before, and its parts are gone",
        version=target.version,
        hint="run this again after the next version, or restart the publisher",
    )


class _BitsAt:
    """Bits of a version, fetched from nothing when they are first needed."""

    def __init__(self, chain: Chain, at: Committed, base: Path | None, reading: ExitStack) -> None:
        self._chain, self._at, self._base, self._reading = chain, at, base, reading
        self._fetched: Fetched | None = None

    def read(self, name: str) -> Bits:
        if self._fetched is None:
            plan = plan_present(self._chain, None, self._at)
            self._fetched = self._reading.enter_context(
                fetching(self._chain, plan, base=self._base, hold=False, room=scratch())
            )
        return self._fetched.read(name).values


def _proven(changes: Iterable[Change], start: Committed, target: Committed) -> Iterable[Change]:
    """Yield changes; raise at the end if sparse ones do not lead to the target's state."""
    total, is_sparse = StateDigest(), True
    for change in changes:
        total += change.digest
        is_sparse = is_sparse and not change.delta.is_dense
        yield change
    if is_sparse and start.state + total != target.state:
        raise _wrong(f"the edges from version {start.version}", start.state + total, target)


def _whole(chain: Chain, fetched: Fetched, target: Committed) -> Iterable[Change]:
    """Yield all bits of every tensor; raise at the end if they are not the target's."""
    total, given = StateDigest(), frozenset(fetched.names)
    for spec, low, high in pieces(chain.table.specs(), PART_NBYTES):
        if spec.name not in given:
            raise BrokenChainError(f"{spec.name}: the plan does not contain the whole tensor")
        delta = fetched.tensor_plan(spec.name).read(low, high).within(low, high)
        digest = host.digest(digest_key(spec), delta.values, low)
        change = Change(delta, digest, windows=not delta.is_dense)
        total += change.digest
        yield change
    if total != target.state:
        raise _wrong("the plan from nothing", total, target)


def _wrong(what: str, found: StateDigest, target: Committed) -> DigestMismatchError:
    return DigestMismatchError(
        f"{what} to version {target.version}", expected=str(target.state), actual=str(found)
    )


def _upload(
    store: Store, kind: PayloadKind, target: Committed, changes: Iterable[Change], limit: int
) -> Edge:
    epoch, commit_id = target.manifest.epoch, uuid.uuid4().hex
    keys = EdgeKeys(kind=kind, version=target.version, epoch=epoch, commit_id=commit_id)
    with EdgeUpload(store, keys, raw=False, part_nbytes=limit) as upload:
        for change in changes:
            upload.add(change)
        return upload.finish()


def _refuse_closed(chain: Chain, target: Committed) -> None:
    chain.prunes.newest()
    if chain.prunes.is_closed(target.version):
        raise ChainError(
            f"version {target.version} is pruned: nothing can be added to it",
            version=target.version,
            hint="choose a version whose delta is not pruned: `deltachain prune URL --dry-run` "
            "lists what is",
        )


def _refuse_pruned(chain: Chain, target: Committed, base: Version | None) -> None:
    _refuse_closed(chain, target)
    if is_pruned(chain, base, target.version):
        raise ChainError(
            f"the {_kind(base)} of version {target.version} is pruned: nobody would use it",
            version=target.version,
            hint="choose a later version; without one, `deltachain anchor` takes the newest",
        )


def is_pruned(chain: Chain, base: Version | None, version: Version) -> bool:
    """Return whether an edge that would be added now, or its version, is pruned."""
    prunes = chain.prunes
    return prunes.is_closed(version) or prunes.names(_kind(base), base, version)


def _kind(base: Version | None) -> EdgeKind:
    return "anchor" if base is None else "skip"
