"""Staging: everything of an apply that can fail, while the target is in use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from deltachain.digest import digest_key
from deltachain.errors import BaseMismatchError, BrokenChainError
from deltachain.fetch import Fetched
from deltachain.kernels import host
from deltachain.subscribe.patch import Patch
from deltachain.subscribe.target import Held, Target
from deltachain.types import StateDigest


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A proven apply that waits for its swap.

    Attributes:
        held: What the target is proven to hold as it is staged; ``None`` for nothing.
        to: What it will hold.
        step: The trainer's step of that version.
        time: When that version was committed, by the publisher's clock.
        generation: Swaps of the subscriber so far; another swap voids this.
        fetched: The objects, for what is decoded again.
        patches: What fits the budget, with old bits.
        deferred: Tensors that did not fit: decoded again while they are written.
        nnz: Elements that will be written.
        head: The newest version when staging ended.
        fetch_s: Seconds of planning and fetching.
        stage_s: Seconds of decoding and proving.
    """

    held: Held | None
    to: Held
    step: int | None
    time: float
    generation: int
    fetched: Fetched
    patches: tuple[Patch, ...]
    deferred: tuple[str, ...]
    nnz: int
    head: int
    fetch_s: float
    stage_s: float

    @property
    def keeps_undo(self) -> bool:
        """Whether a failure in the middle of the swap can be taken back.

        If not, the replica should leave service before it swaps.
        """
        return not self.deferred

    def all_patches(self, target: Target) -> Iterator[Patch]:
        """Every patch, the deferred ones made as they are asked for."""
        yield from self.patches
        for name in self.deferred:
            yield replace(target.prepare(self.fetched.read(name)), old=None)


@dataclass(frozen=True, slots=True)
class Proof:
    """Patches whose result is proven to have the state digest of the manifest.

    Attributes:
        patches: What fits the budget.
        deferred: Tensors that do not.
        nnz: Elements that they write.
        base_too: Whether what they overwrite is proven as well. A plan from nothing leads to the
            right state from any other, but taking it back must lead to one that is known.
    """

    patches: tuple[Patch, ...]
    deferred: tuple[str, ...]
    nnz: int
    base_too: bool


def prove(
    target: Target, fetched: Fetched, *, base: StateDigest | None, state: StateDigest, budget: int
) -> Proof:
    """Compute what a plan will write, and prove that the result is the version it leads to.

    Nothing is written.

    Args:
        target: Read, tensor by tensor.
        fetched: The plan's objects.
        base: State digest the target holds; not needed for a plan from nothing.
        state: State digest of the version.
        budget: Bytes of patches to keep.

    Raises:
        BaseMismatchError: The target does not hold the bits that the plan applies to.
        BrokenChainError: A plan from nothing does not give every tensor whole.
    """
    patches: list[Patch] = []
    deferred: list[str] = []
    change = written = StateDigest()
    nnz = nbytes = 0
    for name, delta in zip(fetched.names, fetched.deltas(), strict=True):
        if fetched.from_nothing and not delta.is_dense:  # before a target makes room for the rest
            raise BrokenChainError(f"{name}: the plan from nothing gives only {delta.nnz} elements")
        patch = target.prepare(delta)
        nnz += patch.nnz
        nbytes += patch.nbytes
        if nbytes <= budget:
            patches.append(patch)
        else:
            deferred.append(name)
        change += patch.change
        if fetched.from_nothing:
            written += host.digest(digest_key(delta.spec), delta.values)
    if fetched.from_nothing and len(fetched.names) != len(fetched.specs):
        raise BrokenChainError("the plan from nothing does not give every tensor")
    changed = None if base is None else base + change
    total = written if fetched.from_nothing else changed
    if total != state:
        raise BaseMismatchError(
            f"{fetched.plan} would lead to state {total}, the manifest says {state}"
            f"{_suspect(fetched, patches)}; nothing was written",
            version=fetched.plan.target,
        )
    return Proof(tuple(patches), tuple(deferred), nnz, base_too=changed == state)


def _suspect(fetched: Fetched, patches: list[Patch]) -> str:
    """Name the tensor whose change is not the one that the publisher saw, if that can be told."""
    for patch in patches:
        rows = [
            part.rows[patch.spec.name] for part in fetched.parts if patch.spec.name in part.rows
        ]
        expected = sum((row.change for row in rows), StateDigest())
        if patch.indices is not None and patch.change != expected:
            return f" (first tensor that differs: {patch.spec.name!r})"
    return ""
