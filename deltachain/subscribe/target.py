"""What a subscriber asks of the thing it writes into."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from deltachain.errors import PartialApplyError, PoisonedError
from deltachain.fetch import Fetched
from deltachain.manifest import Struct
from deltachain.subscribe.patch import LiveBits, Patch, write
from deltachain.types import StateDigest, TensorSpec


class Held(Struct, frozen=True, kw_only=True):
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

    def held(self) -> Held | None:
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
            base: State digest the target holds; ``None`` when that can not be proven.
            state: State digest of the version.
            budget: Bytes of old and new bits to keep. What does not fit is computed again while it
                is written, and can not be taken back.

        Raises:
            BaseMismatchError: The target does not hold the bits that the plan applies to.
            BrokenChainError: A plan from nothing does not give every tensor whole.
        """

    def swap(self, prepared: Prepared, held: Held) -> float:
        """Write what was staged, all or nothing, and remember ``held``; the seconds of writing.

        Raises:
            PartialApplyError: It failed, and the old bits are back.
            PoisonedError: It failed, and what the target holds can not be proven.
        """

    def close(self) -> None:
        """Give back what the target holds on to; closing twice is allowed."""


def write_all(live: Mapping[str, list[LiveBits]], patches: Iterable[Patch], held: Held) -> None:
    """Write patches into live bits; if one fails, take back all that were begun.

    Args:
        live: Every place where a tensor's bits live, by name.
        patches: Consumed once; a patch that is computed only now must be of another tensor than all
            before it.
        held: What is being written, for the error.

    Raises:
        PartialApplyError: It failed, and the old bits are back.
        PoisonedError: Taking back failed as well.
    """
    begun: list[Patch] = []
    lost = ""
    try:
        for patch in patches:
            if patch.old is None:
                lost = patch.spec.name
            else:
                begun.append(patch)
            for bits in live[patch.spec.name]:
                write(bits, patch)
    except BaseException as exc:
        if lost:
            raise PoisonedError(
                f"swap to version {held.version} failed after {lost!r} was overwritten: {exc}",
                version=held.version,
                tensor=lost,
            ) from exc
        _take_back(live, begun, held, exc)
        if not isinstance(exc, Exception):
            raise  # Ctrl-C: the old bits are back, and whoever pressed it is answered
        raise PartialApplyError(
            f"swap to version {held.version} failed and was taken back: {exc}",
            version=held.version,
            tensor=begun[-1].spec.name if begun else "",
        ) from exc


def _take_back(
    live: Mapping[str, list[LiveBits]], begun: list[Patch], held: Held, cause: BaseException
) -> None:
    try:
        for patch in reversed(begun):
            for bits in live[patch.spec.name]:
                write(bits, patch.undo())
    except BaseException as exc:
        raise PoisonedError(
            f"swap to version {held.version} failed ({cause}), and so did taking it back: {exc}",
            version=held.version,
        ) from exc
