"""State digests of tensors that an engine does not use.

No process keeps their bits, only their digests: first from the files that the engine loaded, then
from the rows of anchors and deltas, which the manifests prove.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deltachain.chain.fetch import Fetched
from deltachain.codec import ENCODINGS
from deltachain.codec.container import TensorRow
from deltachain.codec.rows import groups
from deltachain.format.keys import digest_key
from deltachain.kernels import host
from deltachain.subscribe.proof import Effect
from deltachain.types import StateDigest


@dataclass(frozen=True, slots=True)
class UnusedState:
    """State digests of tensors that no rank holds."""

    digests: Mapping[str, StateDigest | None] = field(default_factory=dict)
    joint: frozenset[str] = frozenset()  # tensors of which only the sum of the digests is right
    shared_with_used: str = ""  # a tensor that is unknown

    @property
    def total(self) -> StateDigest | None:
        """Sum of the digests; ``None`` if one of them is unknown."""
        known = [digest for digest in self.digests.values() if digest is not None]
        return sum(known, StateDigest()) if len(known) == len(self.digests) else None

    def after(self, fetched: Fetched) -> "UnusedState":
        held, joint = dict(self.digests), set(self.joint)
        if fetched.base is not None:
            joint.clear()
            for name in held:
                bits = fetched.base.bits(name)
                held[name] = host.digest(digest_key(fetched.specs[name]), bits)
        shared_with_used = ""
        for part in fetched.parts:
            for group in groups(part.rows.values()):
                if len(group) > 1:
                    shared_with_used = _add_group(held, joint, group) or shared_with_used
                elif group[0].name in held:
                    _add_row(held, joint, group[0], fetched.specs[group[0].name].numel)
        return UnusedState(held, frozenset(joint), shared_with_used)

    def effect(self, after: "UnusedState") -> Effect | None:
        """Return the effect of a plan that leads from here to ``after``; ``None`` if unknown.

        ``change`` is zero if only the result is known, as for a plan from nothing.
        """
        before, total = self.total, after.total
        if total is None:
            return None
        return Effect(StateDigest() if before is None else total - before, total, 0)


def _add_row(
    held: dict[str, StateDigest | None], joint: set[str], row: TensorRow, numel: int
) -> None:
    digest, change = held[row.name], StateDigest.parse(row.digest)
    if ENCODINGS.get(row.encoding).sparse:
        held[row.name] = None if digest is None else digest + change
        return
    if row.name in joint:  # the digests of the others say nothing without this one
        held.update(dict.fromkeys(joint))
        joint.clear()
    held[row.name] = change if row.nnz == numel else None


def _add_group(
    held: dict[str, StateDigest | None], joint: set[str], group: Sequence[TensorRow]
) -> str:
    """Count rows that share a digest: their sum is known if no rank holds any of them."""
    names = [row.name for row in group]
    unused = [name for name in names if name in held]
    last = held.get(names[-1])
    if last is not None and all(held.get(name) is not None for name in names):
        held[names[-1]] = last + StateDigest.parse(group[-1].digest)
        joint.update(names)
        return ""
    held.update(dict.fromkeys(unused))
    return unused[0] if 0 < len(unused) < len(names) else ""
