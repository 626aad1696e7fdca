"""Targets in this process, which stage one patch per tensor."""

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from deltachain.chain.fetch import Fetched
from deltachain.codec.rows import changes_of
from deltachain.delta import TensorDelta
from deltachain.errors import BrokenChainError
from deltachain.subscribe.proof import Cause, Effect, check_effect, check_whole
from deltachain.subscribe.targets.base import HeldVersion, Prepared, Target
from deltachain.subscribe.targets.tensor_patch import Patch
from deltachain.threads import Pool, cores
from deltachain.types import Bits, StateDigest, TensorSpec

_T = TypeVar("_T")

SMALL: Final = 1 << 18  # elements below which the calling thread stages a tensor itself

_DAMAGED: Final = (
    "an object of the version is damaged: deltachain verify tells which; put it back from a backup"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patches(Prepared):
    patches: tuple[Patch, ...]
    deferred: tuple[str, ...]  # tensors beyond the budget, decoded again while they are written
    fetched: Fetched | None
    nnz: int
    base_too: bool  # whether the overwritten bits are proven as well

    @property
    def nbytes(self) -> int:
        return sum(patch.nbytes for patch in self.patches)

    @property
    def can_undo(self) -> bool:
        return not self.deferred

    def undo(self) -> "Patches":
        if self.deferred:
            raise ValueError(f"{self.deferred[0]}: the old bits were not kept")
        undone = tuple(patch.undo() for patch in self.patches)
        return replace(self, patches=undone, fetched=None)


class PatchedTarget(Target, ABC):
    room: Path | None = None
    """Folder for large objects on their way, which are held in memory without one."""

    @abstractmethod
    def prepare(self, delta: TensorDelta, *, base_too: bool = True) -> Patch:
        """Compute the patch of a delta, which it may write into, from live bits; thread-safe.

        ``base_too``: whether to compute the digest of old bits that a dense delta replaces.
        """

    @abstractmethod
    def bits(self, name: str) -> Bits:
        """Return all bits of a tensor as they are now, on the host; the caller does not write."""

    @abstractmethod
    def write(self, patches: Iterable[Patch], held: HeldVersion) -> None:
        """Write patches, all or none, and record ``held``; consume ``patches`` once."""

    def decodes_once(self, specs: Iterable[TensorSpec], budget: int) -> bool:
        """Return whether a plan from nothing is staged within a budget, and at once."""
        return 2 * sum(spec.nbytes for spec in specs) <= budget

    def stage(
        self, fetched: Fetched, *, base: StateDigest | None, state: StateDigest, budget: int
    ) -> Patches:
        return self._stage(fetched, base=base, state=state, budget=budget)

    def _stage(
        self,
        fetched: Fetched,
        *,
        base: StateDigest | None,
        state: StateDigest,
        budget: int,
        keep: Callable[[Patch], Patch] = lambda patch: patch,
    ) -> Patches:
        """Stage a plan; ``keep`` returns what is to be kept of a patch, called in threads."""
        patches: list[Patch] = []
        deferred: list[str] = []
        effect = Effect()
        nbytes = 0

        def one(name: str) -> Patch:
            return keep(self._stage_one(fetched, name, base_too=base is not None))

        with Pool(cores(), "deltachain-stage") as pool:
            for patch in self.ordered(pool, one, fetched.specs, fetched.arriving()):
                nbytes += patch.nbytes
                if nbytes <= budget:
                    patches.append(patch)
                else:
                    deferred.append(patch.spec.name)
                effect += patch.effect
        check_whole(fetched)
        base_too = check_effect(
            fetched, effect, base=base, state=state, suspect=partial(_suspect, fetched, patches)
        )
        return Patches(
            patches=tuple(patches),
            deferred=tuple(deferred),
            fetched=fetched,
            nnz=effect.nnz,
            base_too=base_too,
        )

    def _stage_one(self, fetched: Fetched, name: str, *, base_too: bool) -> Patch:
        delta = fetched.read(name, partial(self.bits, name))
        if fetched.from_nothing and not delta.is_dense:  # before space for the rest is taken
            raise BrokenChainError(f"{name}: the plan from nothing gives only {delta.nnz} elements")
        return self.prepare(delta, base_too=base_too)

    @staticmethod
    def ordered(
        pool: Pool,
        function: Callable[[str], _T],
        specs: Mapping[str, TensorSpec],
        names: Iterable[str] | None = None,
    ) -> Iterator[_T]:
        """Call a function for tensors, large ones in threads; yield the results in order."""
        return pool.ordered(
            function,
            specs if names is None else names,
            ahead=2 * cores(),
            small=lambda name: specs[name].numel < SMALL,
        )

    def swap(self, prepared: Prepared, held: HeldVersion) -> float:
        if not isinstance(prepared, Patches):
            raise TypeError(f"{type(self).__name__} cannot swap {type(prepared).__name__}")
        start = time.perf_counter()
        self.write(self._all(prepared), held)
        return time.perf_counter() - start

    def _all(self, prepared: Patches) -> Iterator[Patch]:
        yield from prepared.patches
        if prepared.fetched is not None:
            for name in prepared.deferred:
                delta = prepared.fetched.read(name, partial(self.bits, name))
                yield self.prepare(delta, base_too=False).without_old()


def _suspect(fetched: Fetched, patches: list[Patch]) -> Cause:
    """Name tensors whose change differs from that of their rows, if that can be determined."""
    rows = Counter(row.name for part in fetched.parts for row in part.directory.tensors)
    changes = {
        patch.spec.name: patch.written if patch.indices is None else patch.change
        for patch in patches
        if patch.indices is not None or rows[patch.spec.name] == 1  # then its digest is of new bits
    }
    for names, expected in changes_of([part.directory.tensors for part in fetched.parts]):
        if names <= changes.keys():
            actual = sum((changes[name] for name in names), StateDigest())
            if actual != expected:
                found = ", ".join(repr(name) for name in fetched.specs if name in names)
                return Cause(f" (first to differ: {found})")
    is_sparse = all(patch.indices is not None for patch in patches)
    if is_sparse and not fetched.from_nothing and rows.keys() <= changes.keys():
        return Cause(", though each tensor changes as the delta says", _DAMAGED)
    return Cause()
