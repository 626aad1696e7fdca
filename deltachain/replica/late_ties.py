"""Tensors that an engine keeps as one because their bits were equal when it loaded them.

Engines tie tensors by their values, such as a head that equals the embedding. The decision is made
once: no load parts the tensors again, and each load ignores one of them. A version may change them
only to equal bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from deltachain.codec.old_bits import OldBits
from deltachain.errors import TensorMismatchError
from deltachain.kernels.protocol import same_bits
from deltachain.replica.held_bits import host_bits
from deltachain.replica.layout.loaded_checkpoint import LoadedCheckpoint
from deltachain.replica.spool_reader import TensorPlan
from deltachain.replica.staged import Share

PEEK: Final = 64
"""Elements that are compared first."""


class LateTie(NamedTuple):
    """Two tensors of the chain that the engine keeps as one.

    Attributes:
        ignored: The tensor that nothing in the engine follows.
        followed: The tensor whose bits the engine computes from instead.
    """

    ignored: str
    followed: str


def find_late_ties(
    source: LoadedCheckpoint, ignored: Collection[str], followed: Iterable[str]
) -> tuple[LateTie, ...]:
    """Find tensors that nothing follows, though others with their bits were loaded as well.

    Vectors whose elements are all equal, such as biases of zeros, are alike without being tied.

    Args:
        source: The checkpoint that the engine loaded.
        ignored: Tensors that nothing in the engine follows.
        followed: Tensors that the engine computes from.
    """
    wanted = [
        name
        for name in ignored
        if source.names[name] and (len(source.specs[name].shape) > 1 or name not in source.uniform)
    ]
    alike: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
    for name in followed if wanted else ():
        if source.names[name]:
            alike[source.specs[name].dtype, source.specs[name].shape].append(name)
    return tuple(
        LateTie(name, other)
        for name in wanted
        for other in alike[source.specs[name].dtype, source.specs[name].shape]
        if _equal(source, name, other)
    )


def _equal(source: LoadedCheckpoint, name: str, other: str) -> bool:
    one, two = source.bits(name), source.bits(other)
    return same_bits(one[:PEEK], two[:PEEK]) and same_bits(one, two)


class LateTies:
    """The late ties of a rank, held against each plan.

    Args:
        ties: Ties of tensors whose bits are equal now.
    """

    def __init__(self, ties: Iterable[LateTie] = ()) -> None:
        self._ties = tuple(ties)
        self._names = frozenset(name for tie in self._ties for name in tie)

    def noted(
        self, plans: Iterable[TensorPlan], noted: dict[str, list[TensorPlan]]
    ) -> Iterator[TensorPlan]:
        """Yield tensor plans, and note those of tied tensors."""
        for given in plans:
            if given.spec.name in self._names:
                noted.setdefault(given.spec.name, []).append(given)
            yield given

    def check(
        self, plans: Mapping[str, Sequence[TensorPlan]], share_of: Callable[[str], Share]
    ) -> None:
        """Refuse plans after which tied tensors would have different bits; nothing is written.

        Args:
            plans: Tensor plans of tied tensors, by name.
            share_of: What the rank holds of a tensor, by name.

        Raises:
            TensorMismatchError: There are such tensors.
        """
        for tie in self._ties:
            if plans.keys().isdisjoint(tie):
                continue
            share = share_of(tie.followed)
            if share.places and not _stay_equal(plans, tie, share):
                raise TensorMismatchError(
                    f"{tie.ignored!r} and {tie.followed!r} were equal when the engine loaded them, "
                    "and it keeps them as one; in this version they differ",
                    tensor=tie.ignored,
                    hint="start the engine anew from a checkpoint in which they differ (deltachain "
                    "pull makes one), with tie_word_embeddings false in its config.json; see "
                    "docs/troubleshooting.md#late-ties",
                )


def _stay_equal(plans: Mapping[str, Sequence[TensorPlan]], tie: LateTie, share: Share) -> bool:
    """Return whether the held elements of tied tensors are equal after a plan."""
    places = [place for _, place in share.places]
    found: list[OldBits] = []
    for name in tie:
        # The bits of both are equal before the plan: those of the followed tensor are held.
        mine = plans.get(name, ())
        spec = next(given.spec for one in plans.values() for given in one)
        old = partial(host_bits, places, mine[0].spec if mine else spec)
        before = old(share.low, share.high)
        deltas = [given.read(share.low, share.high, old) for given in mine]
        found.append(before.after(deltas))
    one, two = found
    held: Any = ... if one.held is None else one.held
    return bool(np.array_equal(one.bits[held], two.bits[held]))
