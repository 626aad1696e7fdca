"""Staged writes of a rank: computed from its own share of each tensor, kept until the swap."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np

from deltachain.delta import TensorDelta
from deltachain.replica.spool_reader import Piece
from deltachain.subscribe.proof import Effect
from deltachain.subscribe.targets.base import Write
from deltachain.subscribe.targets.live import LiveElements
from deltachain.subscribe.targets.patch import prepare
from deltachain.threads import Pool

HolderKey: TypeAlias = tuple[str, int]
"""The ranks that hold the same elements, and the number of the place among several on this rank."""

Effects: TypeAlias = dict[HolderKey, Effect]
"""Effects of a stage on the state digest, by holders."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank holds of one tensor.

    Attributes:
        places: Live elements, each with its holders.
        low: Flat index of the first element held.
        high: Flat index after the last one.
    """

    places: Sequence[tuple[HolderKey, LiveElements]]
    low: int
    high: int

    @property
    def on_host(self) -> bool:
        """Whether all live elements are on the host, where any thread may read them."""
        return all(isinstance(place.storage, np.ndarray) for _, place in self.places)


NOTHING: Final = Share((), 0, 0)


@dataclass(frozen=True, slots=True)
class RankStaged:
    """Staged writes of a rank.

    Attributes:
        placed: Patches of live places and of host copies.
        deferred: Pieces beyond the budget, read again while they are written.
        effects: Effects on the state digest.
    """

    placed: tuple[Write, ...]
    deferred: tuple[Piece, ...]
    effects: Effects

    @property
    def names(self) -> set[str]:
        """Names of the tensors to write."""
        placed = {one.patch.spec.name for one in self.placed}
        return placed | {piece.spec.name for piece in self.deferred}

    @property
    def nbytes(self) -> int:
        """Bytes kept by the patches."""
        return sum(placed.patch.own_nbytes for placed in self.placed)

    def writes(self, share_of: Callable[[str], Share]) -> Iterator[Write]:
        """Yield every write; compute deferred ones on demand."""
        yield from self.placed
        for piece in self.deferred:
            for _, placed in _prepared(piece, share_of(piece.spec.name)):
                yield replace(placed, patch=placed.patch.without_old())

    def undoes(self) -> Iterator[Write]:
        """Yield the writes that undo those that were kept, the last one first."""
        for placed in reversed(self.placed):
            yield replace(placed, patch=placed.patch.undo())


@dataclass(frozen=True, slots=True)
class _Read:
    """A piece that was read by a thread, and prepared by it if everything is on the host."""

    piece: Piece
    share: Share
    delta: TensorDelta | None
    writes: Sequence[tuple[HolderKey, Write]] = ()


def stage(
    pieces: Iterator[Piece], share_of: Callable[[str], Share], budget: int, threads: int
) -> RankStaged:
    """Compute the writes of a plan's pieces on one rank; nothing is written.

    Args:
        pieces: Pieces of the plan.
        share_of: What the rank holds of a tensor, by name.
        budget: Bytes of old and new bits to keep.
        threads: Number of threads that inflate and decode. Weights on a device are read by the
            caller alone, whose stream its kernels run on.

    Raises:
        DeltaChainError: A piece cannot be read, or ``share_of`` refuses its tensor.
    """
    kept: list[Write] = []
    deferred: list[Piece] = []
    effects: Effects = defaultdict(Effect)
    nbytes = 0

    def read(piece: Piece) -> _Read:
        share = share_of(piece.spec.name)
        if not share.places:
            return _Read(piece, share, None)
        if share.on_host:
            return _Read(piece, share, None, _prepared(piece, share))
        return _Read(piece, share, piece.read(share.low, share.high))

    with Pool(threads if threads > 1 else 0) as pool:  # without threads, the caller works
        for found in pool.ordered(read, pieces, ahead=2 * threads):
            placed = found.writes if found.delta is None else _placed(found.share, found.delta)
            nbytes += sum(one.patch.own_nbytes for _, one in placed)
            if nbytes <= budget:
                kept += [one for _, one in placed]
            elif placed:
                deferred.append(found.piece)
            for slot, one in placed:
                effects[slot] += one.patch.effect
    return RankStaged(tuple(kept), tuple(deferred), dict(effects))


def _prepared(piece: Piece, share: Share) -> list[tuple[HolderKey, Write]]:
    """Read a piece, and compute its writes at every place."""
    return _placed(share, piece.read(share.low, share.high)) if share.places else []


def _placed(share: Share, delta: TensorDelta) -> list[tuple[HolderKey, Write]]:
    return [(slot, Write(prepare(place, delta), [place])) for slot, place in share.places]
