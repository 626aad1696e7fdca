"""Two versions of a chain, rebuilt tensor by tensor, and the changes that lead back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deltachain.chain.chain import Chain, Committed
from deltachain.chain.fetch import Fetched, fetching
from deltachain.chain.plan import Plan
from deltachain.chain.reachable import plan_present
from deltachain.codec import Change
from deltachain.codec.encodings import Encoding
from deltachain.codec.old_bits import OldBits
from deltachain.delta import TensorDelta
from deltachain.errors import BrokenChainError
from deltachain.format.digest import digest_key
from deltachain.kernels import host
from deltachain.kernels.move import digest_change
from deltachain.kernels.reference import Changes
from deltachain.publish.wire_form import sparse_change
from deltachain.threads import Pool, cores
from deltachain.types import Bits, StateDigest, TensorSpec, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBack:
    """One tensor of two versions.

    Attributes:
        spec: Spec of the tensor.
        changes: Changes from the newer version back to the older one.
        digest: Change of the state digest by these.
        older: Contribution of the older version's tensor to the state digest.
        change: The changes as input of a part; ``None`` if there are none.
    """

    spec: TensorSpec
    changes: Changes
    digest: StateDigest
    older: StateDigest
    change: Change | None = None


@contextmanager
def tensors_back(
    chain: Chain, older: Committed, newer: Committed, *, encoding: Encoding, base: Path | None
) -> Iterator[Iterator[TensorBack]]:
    """Fetch two versions, and yield how each tensor of the newer one becomes that of the older.

    The older version is rebuilt from nothing, the newer one from there or from nothing, whichever
    is cheaper. Pruned objects are used while they are there. At most two tensors a core are
    decoded ahead.

    Args:
        chain: The chain.
        older: The version to go back to.
        newer: The version to start from.
        encoding: Encoding of the changes.
        base: Local folder of the base checkpoint, if the chain starts from one.

    Raises:
        BrokenChainError: A version cannot be rebuilt from the store.
        ObjectNotFoundError: An object was deleted meanwhile.
        FormatError: An object is damaged.
    """
    plans = _plan(chain, None, older), _plan(chain, older.version, newer)
    with ExitStack() as stack:
        start = stack.enter_context(fetching(chain, plans[0], target=older, base=base, hold=False))
        onward = stack.enter_context(fetching(chain, plans[1], target=newer, base=base, hold=False))
        pool = stack.enter_context(Pool(cores()))
        moved = frozenset(onward.names)
        yield pool.ordered(
            lambda spec: _tensor(start, onward if spec.name in moved else None, spec, encoding),
            start.specs.values(),
            ahead=2 * cores(),
        )


def _plan(chain: Chain, held: Version | None, target: Committed) -> Plan:
    """Find a plan; with pruned edges, whose objects may still be there, if no other leads on."""
    try:
        return plan_present(chain, held, target)
    except BrokenChainError:
        if chain.prunes.names_edges:
            with suppress(BrokenChainError):
                return plan_present(chain, held, target, pruned=True)
        raise


def _tensor(
    start: Fetched, onward: Fetched | None, spec: TensorSpec, encoding: Encoding
) -> TensorBack:
    older = start.read(spec.name)
    if not older.is_dense:
        raise BrokenChainError(f"{spec.name}: the chain does not give the whole tensor")
    bits, digest = older.values, host.digest(digest_key(spec), older.values)
    if onward is None:
        nothing = Changes(np.empty(0, np.int64), bits[:0], bits[:0])
        return TensorBack(spec=spec, changes=nothing, digest=StateDigest(), older=digest)
    changes = _changes_back(bits, onward.read(spec.name, lambda: bits))
    back = TensorBack(
        spec=spec, changes=changes, digest=digest_change(spec, *changes), older=digest
    )
    if not changes.indices.size:
        return back
    change = sparse_change(back, lambda: bits, encoding=encoding, held=lambda: OldBits(bits))
    return TensorBack(spec=spec, changes=changes, digest=back.digest, older=digest, change=change)


def _changes_back(older: Bits, delta: TensorDelta) -> Changes:
    """Return the changes that undo a delta of older bits; they are from new bits to old."""
    if delta.indices is None:
        return host.diff_(np.array(delta.values), older)
    old = older[delta.indices]
    new = delta.new_bits(old)
    differ = new != old
    return Changes(delta.indices[differ], new[differ], old[differ])
