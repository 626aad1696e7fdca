"""Targets in this process, which stage one patch per tensor."""

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

from deltachain.chain.fetch import Fetched
from deltachain.delta import Piece, pieces
from deltachain.subscribe.proof import Effect, check_effect, check_whole
from deltachain.subscribe.targets.base import HeldVersion, Prepared, Target
from deltachain.subscribe.targets.tensor_patch import Patch
from deltachain.threads import Pool, cores
from deltachain.types import StateDigest, TensorSpec

_T = TypeVar("_T")

SMALL: Final = 1 << 18  # elements below which the calling thread stages a tensor itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Patches(Prepared):
    patches: tuple[Patch, ...]
    deferred: tuple[Piece, ...]  # beyond the budget, decoded again while they are written
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
            raise ValueError(f"{self.deferred[0].spec.name}: the old bits were not kept")
        undone = tuple(patch.undo() for patch in self.patches)
        return replace(self, patches=undone, fetched=None)


class PatchedTarget(Target, ABC):
    room: Path | None = None
    """Folder for large objects on their way, which are held in memory without one."""

    piece_nbytes: int = sys.maxsize
    """Most bytes of a piece of a tensor."""

    @abstractmethod
    def patches(self, fetched: Fetched, piece: Piece, *, base_too: bool) -> Iterator[Patch]:
        """Compute the patches of a piece from live bits; thread-safe.

        ``base_too``: whether to compute the digest of old bits that dense deltas replace.
        """

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
        deferred: list[Piece] = []
        effect = Effect()
        nbytes = 0

        def one(piece: Piece) -> tuple[Piece, list[Patch]]:
            return piece, [keep(p) for p in self.patches(fetched, piece, base_too=base is not None)]

        with Pool(cores(), "deltachain-stage") as pool:
            arriving = (fetched.specs[name] for name in fetched.arriving())
            for piece, found in self.ordered(pool, one, pieces(arriving, self.piece_nbytes)):
                nbytes += sum(patch.nbytes for patch in found)
                if nbytes <= budget:
                    patches += found
                else:
                    deferred.append(piece)
                effect = sum((patch.effect for patch in found), effect)
        check_whole(fetched)
        base_too = check_effect(fetched, effect, base=base, state=state)
        return Patches(
            patches=tuple(patches),
            deferred=tuple(deferred),
            fetched=fetched,
            nnz=effect.nnz,
            base_too=base_too,
        )

    @staticmethod
    def ordered(pool: Pool, function: Callable[[Piece], _T], some: Iterable[Piece]) -> Iterator[_T]:
        """Call a function for pieces, large ones in threads; yield the results in order."""
        return pool.ordered(
            function,
            some,
            ahead=2 * cores(),
            small=lambda piece: piece.high - piece.low < SMALL,
        )

    def swap(self, prepared: Prepared, held: HeldVersion) -> float:
        if not isinstance(prepared, Patches):
            raise TypeError(f"{type(self).__name__} cannot swap {type(prepared).__name__}")
        start = time.perf_counter()
        self.write(self._all(prepared), held)
        return time.perf_counter() - start

    def _all(self, prepared: Patches) -> Iterator[Patch]:
        yield from prepared.patches
        if (fetched := prepared.fetched) is None:
            return

        def again(piece: Piece) -> list[Patch]:
            return [one.without_old() for one in self.patches(fetched, piece, base_too=False)]

        with Pool(cores(), "deltachain-stage") as pool:
            for found in self.ordered(pool, again, prepared.deferred):
                yield from found
