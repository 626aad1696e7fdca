"""What a subscriber asks of the thing it writes into."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from deltachain.chain.fetch import Fetched
from deltachain.errors import PartialApplyError, PoisonedError
from deltachain.format.documents import Struct
from deltachain.subscribe.targets.live import LiveElements
from deltachain.subscribe.targets.patch import Patch
from deltachain.subscribe.targets.patch import write as write_patch
from deltachain.types import StateDigest, TensorSpec, Version


class HeldVersion(Struct, frozen=True, kw_only=True):
    """The version that a target holds.

    Attributes:
        chain: Id of the chain.
        version: Its number.
        epoch: Epoch of its manifest.
        manifest: blake3 of its manifest's exact bytes.
        state: Its state digest.
    """

    chain: str
    version: int
    epoch: int
    manifest: str
    state: str


class Prepared(Protocol):
    """What a target keeps of an apply between its two halves, and afterwards to take it back."""

    @property
    def nnz(self) -> int:
        """Elements that it writes."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""

    @property
    def base_too(self) -> bool:
        """Whether what it overwrites is proven as well.

        A plan from nothing leads to the right state from any other, but taking it back must lead to
        one that is known.
        """

    @property
    def can_undo(self) -> bool:
        """Whether the old bits are kept, so that a failure in the middle can be taken back.

        If not, the replica should leave service before it swaps.
        """

    def undo(self) -> Prepared:
        """What takes it back."""


class Target(Protocol):
    """A copy of the model that a subscriber keeps up with the chain.

    ``bind`` comes first. ``stage`` only reads, and may run while the model is in use; ``swap`` is
    the only method that writes, and needs that nobody else does.
    """

    def bind(self, specs: Mapping[str, TensorSpec], aliases: Mapping[str, str]) -> None:
        """Match the chain's tensors to the target's.

        Raises:
            TensorMismatchError: A tensor is missing, or has another dtype or shape.
        """

    def held(self) -> HeldVersion | None:
        """What the target itself remembers to hold; ``None`` when it remembers nothing."""

    def state(self) -> StateDigest | None:
        """State digest of the live bits, recomputed.

        ``None`` when there are none, or when tied weights that should be equal are not.
        """

    def stage(
        self, fetched: Fetched, *, base: StateDigest | None, state: StateDigest, budget: int
    ) -> Prepared:
        """Compute what a plan will write, and prove that the result is the version it leads to.

        Nothing is written.

        Args:
            fetched: The plan's objects.
            base: State digest the target holds; ``None`` when that cannot be proven.
            state: State digest of the version.
            budget: Bytes of old and new bits to keep. What does not fit is computed again while it
                is written, and cannot be taken back.

        Raises:
            BaseMismatchError: The target does not hold the bits that the plan applies to.
            BrokenChainError: A plan from nothing does not give every tensor whole.
        """

    def swap(self, prepared: Prepared, held: HeldVersion) -> float:
        """Write what was staged, all or nothing, and remember ``held``; the seconds of writing.

        Raises:
            PartialApplyError: It failed, and the old bits are back.
            PoisonedError: It failed, and what the target holds cannot be proven.
        """

    def close(self) -> None:
        """Give back what the target holds on to; closing twice is allowed."""


@dataclass(frozen=True, slots=True)
class Write:
    """A patch, and every place it goes to."""

    patch: Patch
    places: Sequence[LiveElements]


def write_all(writes: Iterable[Write], version: Version) -> list[Write]:
    """Write patches into live bits; if one fails, take back all that were begun.

    Args:
        writes: Consumed once; one that is computed only now must be of another tensor than all
            before it.
        version: What is being written, for the error.

    Returns:
        What was written, for :func:`take_back`.

    Raises:
        PartialApplyError: It failed, and the old bits are back.
        PoisonedError: Taking back failed as well.
    """
    begun: list[Write] = []
    try:
        for write in writes:
            begun.append(write)
            for live in write.places:
                write_patch(live, write.patch)
    except BaseException as exc:
        take_back(begun, version, exc)
        if not isinstance(exc, Exception):
            raise  # Ctrl-C: the old bits are back, and whoever pressed it is answered
        raise PartialApplyError(
            f"swap to version {version} failed and was taken back: {exc}",
            version=version,
            tensor=begun[-1].patch.spec.name if begun else "",
        ) from exc
    return begun


def take_back(begun: Sequence[Write], version: Version, cause: BaseException) -> None:
    """Put back the bits that were there before some writes, newest first.

    Raises:
        PoisonedError: One could not be, or its old bits were not kept.
    """
    lost = next((w.patch.spec.name for w in reversed(begun) if w.patch.old is None), "")
    if lost:
        raise PoisonedError(
            f"swap to version {version} failed after {lost!r} was overwritten: {cause}",
            version=version,
            tensor=lost,
        ) from cause
    try:
        for write in reversed(begun):
            for live in write.places:
                write_patch(live, write.patch.undo())
    except BaseException as exc:
        raise PoisonedError(
            f"swap to version {version} failed ({cause}), and so did taking it back: {exc}",
            version=version,
        ) from exc
