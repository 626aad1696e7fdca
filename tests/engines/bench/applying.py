"""One update at a time in a live model: the product, the floor, and what the engine itself offers.

Everything writes the same bits into the same live model, in one process, in turn: what the product
has just written, its floor and its peers write again, or they write what the model already holds
before the product's turn comes. So no candidate ever leaves anything for the next one to mend, and
the state digest of the live weights at the end speaks for all of them.
"""

import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltachain.checkpoint import Checkpoint
from deltachain.delta import TensorDelta
from deltachain.replica.rank import Rank
from deltachain.subscribe.subscriber import Subscriber
from deltachain.subscribe.targets.base import Write
from tests.bench.report import say
from tests.engines.bench.figures import (
    FETCH,
    FLOOR,
    LOAD,
    PATCHES,
    PAUSE,
    RELOAD,
    STAGE,
    SWAP,
    TOTAL,
    Applied,
    Drawn,
)

Weights: TypeAlias = "list[tuple[str, Tensor]]"

Dense: TypeAlias = "Mapping[str, npt.NDArray[Any]]"
"""Bits of every tensor of the chain, as they are now."""


@dataclass(frozen=True, slots=True)
class Live:
    """A live model of an engine, in this process."""

    subscriber: Subscriber
    rank: Callable[[], Rank]
    load: "Callable[[Weights], object]"
    reload: "Callable[[Weights], object]"
    patches: "Callable[[Mapping[str, TensorDelta], Dense], float] | None" = None


def follow(live: Live, drawn: Drawn, *, plain: bool, warm_up: int) -> Applied:
    """Follow a chain to its end; after each version, or before it, the others write as well."""
    found = Applied(plain=plain, threads=torch.get_num_threads())
    start = time.perf_counter()
    live.subscriber.open()
    found.attach_s = time.perf_counter() - start
    classes = live.subscriber.target.classes()  # type: ignore[attr-defined]
    found.classes = {kind: row["nbytes"] for kind, row in classes.items()}
    bench = _Bench(live, drawn, plain=plain)
    for version in range(1, len(drawn.densities) + 1):
        say(f"{drawn.size} {'in place' if plain else 'stock'}: version {version}")
        seconds = bench.version(version, first=bool((version - 1) // warm_up % 2))
        if version > warm_up:
            found.seconds[version] = seconds
    found.proven = live.subscriber.scrub()
    found.peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return found


class _Bench:
    def __init__(self, live: Live, drawn: Drawn, *, plain: bool) -> None:
        self.live, self.subscriber, self.plain = live, live.subscriber, plain
        checkpoint = Checkpoint(drawn.base)
        self.specs = list(self.subscriber.chain.table.specs())
        self.dense = {spec.name: checkpoint.bits(spec.name).copy() for spec in self.specs}

    def version(self, version: int, *, first: bool) -> dict[str, float]:
        start = time.perf_counter()
        staged = self.subscriber.stage(version)
        total = time.perf_counter() - start
        if staged is None:
            raise RuntimeError(f"version {version} is held already")
        deltas = {delta.spec.name: delta for delta in staged.fetched.deltas()}
        seconds: dict[str, float] = {}
        if not first:
            seconds |= self._others(deltas, new=False)
        start = time.perf_counter()
        receipt = self.subscriber.swap(staged)
        total += time.perf_counter() - start
        for name, delta in deltas.items():
            self.dense[name][delta.indices] = delta.new_bits(self.dense[name][delta.indices])
        if first:
            seconds |= self._others(deltas, new=True)
        seconds |= {name: getattr(receipt, f"{name}_s") for name in (FETCH, STAGE, SWAP, PAUSE)}
        return seconds | {TOTAL: total}

    def _others(self, deltas: Mapping[str, TensorDelta], *, new: bool) -> dict[str, float]:
        found = {FLOOR: self._floor(new=new)}
        if self.plain:
            found[LOAD] = seconds_of(lambda: self.live.load(self._weights()))
            if self.live.patches:
                found[PATCHES] = self.live.patches(deltas, self.dense)
        found[RELOAD] = seconds_of(lambda: self.live.reload(self._weights()))
        return found

    def _floor(self, *, new: bool) -> float:
        """Bare writes of the very elements that the product writes, in one thread as it does."""
        writes = []
        rank = self.live.rank()
        for placed in rank.staged[max(rank.staged)].placed:
            assert isinstance(placed, Write)
            bits: Any = placed.patch.new if new else placed.patch.old
            live = placed.places[0].storage
            writes.append((torch_of(live), torch_of(placed.patch.indices), torch_of(bits)))

        def run() -> None:
            for live, indices, bits in writes:
                live.index_copy_(0, indices, bits)

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return seconds_of(run)
        finally:
            torch.set_num_threads(threads)

    def _weights(self) -> list[tuple[str, Tensor]]:
        return [
            (spec.name, torch_of(self.dense[spec.name]).view(torch.bfloat16).view(spec.shape))
            for spec in self.specs
        ]


def torch_of(array: Any) -> Tensor:
    writable: npt.NDArray[Any] = array
    if not writable.flags.writeable:
        writable = np.array(writable)
    return torch.from_numpy(writable.view(f"<i{writable.itemsize}"))


def seconds_of(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
