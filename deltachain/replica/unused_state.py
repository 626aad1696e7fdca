"""State digests of tensors that an engine does not use.

No process keeps their bits, only their digests: first from the files that the engine loaded, then
from the rows of anchors and deltas, which the manifests prove.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from deltachain.chain.fetch import Fetched
from deltachain.codec import ENCODINGS
from deltachain.format.digest import digest_key
from deltachain.kernels import host
from deltachain.subscribe.proof import Effect
from deltachain.types import StateDigest


@dataclass(frozen=True, slots=True)
class UnusedState:
    """State digests of tensors that no rank holds.

    Attributes:
        digests: Digests by name; ``None`` where the content of a tensor is unknown.
    """

    digests: Mapping[str, StateDigest | None] = field(default_factory=dict)

    @property
    def total(self) -> StateDigest | None:
        """Sum of the digests; ``None`` if one of them is unknown."""
        known = [digest for digest in self.digests.values() if digest is not None]
        return sum(known, StateDigest()) if len(known) == len(self.digests) else None

    def after(self, fetched: Fetched) -> UnusedState:
        """Return the digests after a plan."""
        return UnusedState({n: _after(fetched, n, held) for n, held in self.digests.items()})

    def effect(self, after: UnusedState) -> Effect | None:
        """Return the effect of a plan that leads from here to ``after``; ``None`` if unknown.

        ``change`` is zero if only the result is known, as for a plan from nothing.
        """
        before, total = self.total, after.total
        if total is None:
            return None
        return Effect(StateDigest() if before is None else total - before, total, 0)


def unused_state(names: Iterable[str], known: Mapping[str, StateDigest]) -> UnusedState:
    """Return the state of tensors from the known digests; the others are unknown."""
    return UnusedState({name: known.get(name) for name in names})


def _after(fetched: Fetched, name: str, held: StateDigest | None) -> StateDigest | None:
    spec = fetched.specs[name]
    if fetched.base is not None:
        held = host.digest(digest_key(spec), fetched.base.bits(name))
    for part in fetched.parts:
        row = part.rows.get(name)
        if row is None:
            continue
        if ENCODINGS.get(row.encoding).sparse:
            held = None if held is None else held + row.change
        else:
            held = row.change if row.nnz == spec.numel else None
    return held
