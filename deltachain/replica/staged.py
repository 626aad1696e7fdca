"""Staged writes of a rank: computed from its own share of each tensor, kept until the swap."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias, cast

import numpy as np

from deltachain.chain.tensor_plan import TensorPlan
from deltachain.delta import TensorDelta, bits_are_at_fault
from deltachain.subscribe.proof import Effect
from deltachain.subscribe.targets.base import StagedWrite, Write
from deltachain.subscribe.targets.tensor_patch import LiveElements, prepare, prepare_steps
from deltachain.threads import Pool

from .batches import DeviceStager, GroupPlan, HostStager, LayoutStreams
from .placements import HolderKey
from .spool import host_bits

Effects: TypeAlias = dict[HolderKey, Effect]  # effects of a stage on the state digest, by holders


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank holds of one tensor."""

    places: Sequence[tuple[HolderKey, LiveElements]]  # live elements, each with its holders
    low: int  # flat index of the first element held
    high: int  # flat index after the last one

    @property
    def on_host(self) -> bool:
        """Whether all live elements are on the host, where any thread may read them."""
        return all(isinstance(place.storage, np.ndarray) for _, place in self.places)


NOTHING: Final = Share((), 0, 0)

BATCH: Final = 64 << 20
"""Bytes of streams that are decoded at once: enough to fill a device, and temporaries of a few
hundred megabytes."""


@dataclass(frozen=True, slots=True)
class RankStaged:
    placed: tuple[StagedWrite, ...]  # patches of live places and of host copies
    deferred: tuple[TensorPlan | GroupPlan, ...]  # plans beyond the budget
    effects: Effects

    @property
    def names(self) -> set[str]:
        placed = {name for one in self.placed for name in one.names}
        return placed | {name for given in self.deferred for name in given.names}

    @property
    def nbytes(self) -> int:
        return sum(placed.nbytes for placed in self.placed)

    def writes(self, share_of: Callable[[str], Share]) -> Iterator[StagedWrite]:
        """Yield every write; compute deferred ones on demand."""
        yield from self.placed
        for given in (one for some in self.deferred for one in some.tensor_plans()):
            for _, placed in _prepared(given, share_of(given.spec.name)):
                yield placed.without_old()

    def undoes(self) -> Iterator[StagedWrite]:
        for placed in reversed(self.placed):
            yield placed.undo()


class _Stage:
    """One stage of a rank: tensor plans are read in any thread, and kept in order by one."""

    def __init__(self, share_of: Callable[[str], Share], budget: int) -> None:
        self._share_of, self._budget = share_of, budget
        self._nbytes = 0
        self._kept: list[StagedWrite] = []
        self._deferred: list[TensorPlan | GroupPlan] = []
        self._effects: Effects = defaultdict(Effect)
        self._waiting: list[tuple[GroupPlan, list[list[LayoutStreams]]]] = []
        self._waiting_nbytes = 0
        self._device: DeviceStager | None = None

    def read(self, given: TensorPlan | GroupPlan) -> Callable[[], None]:
        """Read a plan; return what the caller does next, on whose stream kernels run."""
        if isinstance(given, GroupPlan):
            stager = given.stager
            if isinstance(stager, DeviceStager):
                return partial(self._wait, stager, given, stager.read(given))
            writes, effects = cast("HostStager", stager).stage(given)
            return partial(self._add, [given], writes, effects.items())
        share = self._share_of(given.spec.name)
        if not share.places:
            return lambda: None
        if share.on_host:
            return partial(self._keep, given, _prepared(given, share))
        if given.needs_old:
            return lambda: self._keep(given, _prepared(given, share))
        delta = given.read(share.low, share.high)
        return lambda: self._keep(given, _placed(share, delta))

    def _keep(self, given: TensorPlan, placed: Sequence[tuple[HolderKey, Write]]) -> None:
        writes = [one for _, one in placed]
        self._add([given], writes, ((slot, one.patch.effect) for slot, one in placed))

    def _wait(
        self, stager: DeviceStager, group: GroupPlan, streams: list[list[LayoutStreams]]
    ) -> None:
        self._device = stager
        nbytes = sum(one.streams.nbytes for some in streams for one in some)
        if self._waiting_nbytes + nbytes > BATCH:
            self._stage_waiting()
        self._waiting.append((group, streams))
        self._waiting_nbytes += nbytes

    def result(self) -> RankStaged:
        self._stage_waiting()
        return RankStaged(tuple(self._kept), tuple(self._deferred), dict(self._effects))

    def _stage_waiting(self) -> None:
        ready, self._waiting, self._waiting_nbytes = self._waiting, [], 0
        for groups, write, effects in self._device.stage(ready) if self._device else ():
            self._add(groups, (write,), effects.items())

    def _add(
        self,
        plans: Sequence[TensorPlan | GroupPlan],
        writes: Sequence[StagedWrite],
        effects: Iterable[tuple[HolderKey, Effect]],
    ) -> None:
        """Keep the writes of some plans, or defer these if the budget is spent."""
        self._nbytes += sum(write.nbytes for write in writes)
        if self._nbytes <= self._budget:
            self._kept += writes
        elif writes:
            self._deferred += plans
        for slot, effect in effects:
            self._effects[slot] += effect


def stage(
    plans: Iterator[TensorPlan | GroupPlan],
    share_of: Callable[[str], Share],
    budget: int,
    threads: int,
) -> RankStaged:
    """Compute the writes of a plan on one rank; nothing is written."""
    work = _Stage(share_of, budget)
    with Pool(threads if threads > 1 else 0) as pool:  # without threads, the caller works
        for take in pool.ordered(work.read, plans, ahead=2 * threads):
            take()
    return work.result()


def _prepared(given: TensorPlan, share: Share) -> list[tuple[HolderKey, Write]]:
    if not share.places:
        return []
    old = partial(host_bits, [place for _, place in share.places], given.spec)
    if not share.on_host:
        return _placed(share, given.read(share.low, share.high, old))
    reader = given.steps(share.low, share.high, old)
    if reader is None or (reader.old is not None and len(share.places) > 1):
        return _placed(share, given.read(share.low, share.high, old))
    with nullcontext() if reader.old is None else bits_are_at_fault(given.spec.name):
        patches = [(slot, prepare_steps(place, reader), place) for slot, place in share.places]
    return [(slot, Write(patch, [place])) for slot, patch, place in patches]


def _placed(share: Share, delta: TensorDelta) -> list[tuple[HolderKey, Write]]:
    return [(slot, Write(prepare(place, delta), [place])) for slot, place in share.places]
