"""Interfaces of a target, writes of all or nothing, and what targets in this process share."""

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol, TypeVar

from deltachain.chain.fetch import Fetched
from deltachain.codec.decode import Range
from deltachain.delta import Piece, pieces
from deltachain.errors import PartialApplyError, PoisonedError
from deltachain.format.documents import Struct
from deltachain.subscribe.proof import Effect, check_effect, check_whole
from deltachain.subscribe.targets.tensor_patch import LiveElements, Patch
from deltachain.subscribe.targets.tensor_patch import write as write_patch
from deltachain.threads import Pool, cores
from deltachain.types import StateDigest, TensorSpec, Version


class HeldVersion(Struct, frozen=True, kw_only=True):
    chain: str
    version: int
    epoch: int
    manifest: str  # blake3 of the manifest's exact bytes
    state: str


class Prepared(Protocol):
    @property
    def nnz(self) -> int:
        """Number of elements to write."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory used."""

    @property
    def base_too(self) -> bool:
        """Whether the overwritten bits are proven as well.

        A plan from nothing leads to the right state from any other, but undoing it must lead to a
        known state.
        """

    @property
    def can_undo(self) -> bool:
        """Whether the old bits are kept, so that a failed write can be undone.

        If not, the replica should leave service before it swaps.
        """

    def undo(self) -> "Prepared":
        """Return the staged apply that undoes this one."""


class Target(Protocol):
    """A copy of the model that a subscriber keeps up to date with the chain.

    Call ``bind`` first. ``stage`` only reads, and may run while the model is in use; ``swap`` is
    the only method that writes, and requires that no one else writes meanwhile.

    ``wanted`` has the range of flat indices of each tensor that ``stage`` reads; empty for all.
    """

    wanted: Mapping[str, Range] = {}

    def bind(self, specs: Mapping[str, TensorSpec], aliases: Mapping[str, str]) -> None:
        """Match the chain's tensors to the target's.

        Raises:
            TensorMismatchError: A tensor is missing, or has another dtype or shape.
        """

    def held(self) -> HeldVersion | None:
        """Return the version held, by the target's own record; ``None`` without a record."""

    def state(self) -> StateDigest | None:
        """Recompute the state digest from the live bits.

        ``None`` if there are none, or if tied weights are not equal.
        """

    def is_altered(self) -> bool:
        """Return whether someone else may have written since the last ``state`` or ``swap``.

        Costs microseconds, and is not a proof: ``state`` is.
        """
        return False

    def stage(
        self, fetched: Fetched, *, base: StateDigest | None, state: StateDigest, budget: int
    ) -> Prepared:
        """Compute the writes of a plan, and prove that their result is the plan's version.

        Weights stay as they are; those of a new folder are written into a hidden file.

        Args:
            fetched: Objects of the plan.
            base: State digest of the bits held; ``None`` if that cannot be proven.
            state: State digest of the version.
            budget: Bytes of old and new bits to keep. Writes beyond it are computed again during
                the swap, and cannot be undone.

        Raises:
            BaseMismatchError: The target does not hold the bits that the plan applies to.
            BrokenChainError: A plan from nothing does not have all elements of every tensor.
        """

    def swap(self, prepared: Prepared, held: HeldVersion) -> float:
        """Write staged bits, all or nothing, and record ``held``; return the seconds of writing.

        Raises:
            PartialApplyError: The write failed, and the old bits are restored.
            PoisonedError: The write failed, and the target's bits cannot be proven.
        """

    def close(self) -> None:
        """Release the target's resources; closing twice is allowed."""


class StagedWrite(Protocol):
    @property
    def names(self) -> Sequence[str]:
        """Names of the tensors, at least one."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory of its own."""

    @property
    def can_undo(self) -> bool:
        """Whether the old bits are kept, or will be."""

    def run(self) -> None:
        """Write into live bits; after an interruption, ``undo().run()`` restores them."""

    def undo(self) -> "StagedWrite":
        """Return the write that undoes this one."""

    def without_old(self) -> "StagedWrite":
        """Return the same write, which cannot be undone; before it is run only."""


@dataclass(frozen=True, slots=True)
class Write(StagedWrite):
    patch: Patch
    places: Sequence[LiveElements]

    @property
    def names(self) -> Sequence[str]:
        return (self.patch.spec.name,)

    @property
    def nbytes(self) -> int:
        return self.patch.own_nbytes

    @property
    def can_undo(self) -> bool:
        return self.patch.can_undo

    def run(self) -> None:
        for live in self.places:
            write_patch(live, self.patch)

    def undo(self) -> "Write":
        return replace(self, patch=self.patch.undo())

    def without_old(self) -> "Write":
        return replace(self, patch=self.patch.without_old())


def write_all(writes: Iterable[StagedWrite], version: Version) -> list[StagedWrite]:
    """Write patches, computed on demand; if one fails, undo all. Returns the writes."""
    begun: list[StagedWrite] = []
    try:
        for write in writes:
            begun.append(write)
            write.run()
    except BaseException as exc:
        take_back(begun, version, exc)
        if not isinstance(exc, Exception):
            raise  # such as KeyboardInterrupt: the old bits are restored
        raise PartialApplyError(
            f"swap to version {version} failed and was taken back: {exc}",
            version=version,
            tensor=begun[-1].names[0] if begun else "",
        ) from exc
    return begun


def take_back(begun: Sequence[StagedWrite], version: Version, cause: BaseException) -> None:
    """Restore the bits from before some writes, newest first, or raise a ``PoisonedError``."""
    lost = next((w.names[0] for w in reversed(begun) if not w.can_undo), "")
    if lost:
        raise PoisonedError(
            f"swap to version {version} failed after {lost!r} was overwritten: {cause}",
            version=version,
            tensor=lost,
        ) from cause
    try:
        for write in reversed(begun):
            write.undo().run()
    except BaseException as exc:
        raise PoisonedError(
            f"swap to version {version} failed ({cause}), and so did taking it back: {exc}",
            version=version,
        ) from exc


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
    def patches(self, fetched: Fetched, piece: Piece, *, base_too: bool | None) -> Iterator[Patch]:
        """Compute the patches of a piece from live bits; thread-safe.

        ``base_too``: whether to compute the digest of old bits that dense deltas replace;
        ``None`` for elements that are proven already.
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

    def ordered(
        self, pool: Pool, function: Callable[[Piece], _T], some: Iterable[Piece]
    ) -> Iterator[_T]:
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
            return [one.without_old() for one in self.patches(fetched, piece, base_too=None)]

        with Pool(cores(), "deltachain-stage") as pool:
            for found in self.ordered(pool, again, prepared.deferred):
                yield from found
