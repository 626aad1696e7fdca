"""Proof that a plan leads to the state digest of its version, from the changed elements alone."""

from dataclasses import dataclass, field

from deltachain.chain.fetch import Fetched
from deltachain.errors import BaseMismatchError, BrokenChainError
from deltachain.types import StateDigest


@dataclass(frozen=True, slots=True)
class Effect:
    change: StateDigest = field(default_factory=StateDigest)  # change of the state digest
    written: StateDigest = field(default_factory=StateDigest)  # of a plan from nothing, or zero
    nnz: int = 0

    def __add__(self, other: "Effect") -> "Effect":
        return Effect(
            self.change + other.change, self.written + other.written, self.nnz + other.nnz
        )


def check_whole(fetched: Fetched) -> None:
    if fetched.from_nothing and len(fetched.names) != len(fetched.specs):
        raise BrokenChainError("the plan from nothing does not contain every tensor")


def check_effect(
    fetched: Fetched,
    effect: Effect,
    *,
    base: StateDigest | None,
    state: StateDigest,
) -> bool:
    """Prove that an effect leads to ``state``; return whether the old bits are proven too."""
    changed = None if base is None else base + effect.change
    total = effect.written if fetched.from_nothing else changed
    if total != state:
        raise BaseMismatchError(
            f"{fetched.plan} would lead to state {total}, expected {state}; nothing was written",
            version=fetched.plan.target,
        )
    return changed == state
