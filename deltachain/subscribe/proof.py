"""The proof that a plan leads to the version it promises, from what it changes alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from deltachain.chain.fetch import Fetched
from deltachain.errors import BaseMismatchError, BrokenChainError
from deltachain.types import StateDigest


@dataclass(frozen=True, slots=True)
class Effect:
    """What a plan does to the live bits.

    Attributes:
        change: What it does to the state digest.
        written: State digest of what a plan from nothing writes; zero for any other.
        nnz: Elements written.
    """

    change: StateDigest = field(default_factory=StateDigest)
    written: StateDigest = field(default_factory=StateDigest)
    nnz: int = 0

    def __add__(self, other: Effect) -> Effect:
        return Effect(
            self.change + other.change, self.written + other.written, self.nnz + other.nnz
        )


def check_whole(fetched: Fetched) -> None:
    """Refuse a plan from nothing that leaves tensors out.

    Raises:
        BrokenChainError: It does.
    """
    if fetched.from_nothing and len(fetched.names) != len(fetched.specs):
        raise BrokenChainError("the plan from nothing does not give every tensor")


def judge(
    fetched: Fetched,
    effect: Effect,
    *,
    base: StateDigest | None,
    state: StateDigest,
    suspect: Callable[[], str] = str,
) -> bool:
    """Prove the state that an effect leads to.

    Args:
        fetched: The plan.
        effect: What it does, added up over all tensors and ranks.
        base: State digest the target holds; not needed for a plan from nothing.
        state: State digest of the version.
        suspect: Asked, if it fails, what is probably wrong.

    Returns:
        Whether what is overwritten is proven as well.

    Raises:
        BaseMismatchError: The target does not hold the bits that the plan applies to.
    """
    changed = None if base is None else base + effect.change
    total = effect.written if fetched.from_nothing else changed
    if total != state:
        raise BaseMismatchError(
            f"{fetched.plan} would lead to state {total}, the manifest says {state}"
            f"{suspect()}; nothing was written",
            version=fetched.plan.target,
        )
    return changed == state
