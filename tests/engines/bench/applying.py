"""One update at a time in an offline vLLM: the product, the floor, and what vLLM itself offers.

Everything writes the same bits into the same live model, in one process, in turn: what the product
has just written, its floor and its peers write again, or they write what the model already holds
before the product's turn comes. So no candidate ever leaves anything for the next one to mend, and
the state digest of the live weights at the end speaks for all of them.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)

import deltachain_vllm
from deltachain.bench.timing import say
from deltachain.checkpoint import Checkpoint
from deltachain.delta import TensorDelta
from deltachain.subscribe.rank import Rank
from deltachain.subscribe.subscriber import Subscriber
from deltachain_vllm.extension import worker_verbs
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


def follow(llm: Any, drawn: Drawn, *, plain: bool, warm_up: int) -> Applied:
    """Follow a chain to its end; after each version, or before it, the others write as well.

    Args:
        llm: Holds version 0.
        drawn: The chain.
        plain: Whether linear layers kept their weights.
        warm_up: Versions that do not count.
    """
    found = Applied(plain=plain, threads=torch.get_num_threads())
    subscriber = deltachain_vllm.subscribe(llm, drawn.url)
    start = time.perf_counter()
    subscriber.open()
    found.attach_s = time.perf_counter() - start
    classes = subscriber.target.classes()  # type: ignore[attr-defined]
    found.classes = {kind: row["nbytes"] for kind, row in classes.items()}
    bench = _Bench(llm, subscriber, drawn, plain=plain)
    for version in range(1, len(drawn.densities) + 1):
        say(f"{drawn.size} {'in place' if plain else 'stock'}: version {version}")
        seconds = bench.version(version, first=bool((version - 1) // warm_up % 2))
        if version > warm_up:
            found.seconds[version] = seconds
    found.proven = subscriber.scrub()
    found.peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return found


class _Bench:
    """The live model, its subscriber, and the dense weights that a trainer would send."""

    def __init__(self, llm: Any, subscriber: Subscriber, drawn: Drawn, *, plain: bool) -> None:
        self.llm, self.subscriber, self.plain = llm, subscriber, plain
        (self.model,) = llm.collective_rpc(lambda worker: worker.model_runner.get_model())
        self.config = llm.llm_engine.vllm_config
        self.rank: Rank = worker_verbs(self.model, self.config, 0).rank
        checkpoint = Checkpoint(drawn.base)
        self.specs = list(subscriber.chain.table.specs())
        self.dense = {spec.name: checkpoint.bits(spec.name).copy() for spec in self.specs}

    def version(self, version: int, *, first: bool) -> dict[str, float]:
        """Seconds of every candidate for one version; the product is the first or the last."""
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
        """The floor, and what vLLM itself has; each writes what the model holds now."""
        found = {FLOOR: self._floor(new=new)}
        if self.plain:
            found[LOAD] = _seconds(self._load_weights)
            found[PATCHES] = self._patches(deltas)
        found[RELOAD] = _seconds(
            lambda: self.llm.collective_rpc("reload_weights", args=(self._weights(),))
        )
        return found

    def _floor(self, *, new: bool) -> float:
        """Bare writes of the very elements that the product writes, in one thread as it does."""
        writes = []
        for placed in self.rank.staged[max(self.rank.staged)].placed:
            bits: Any = placed.patch.new if new else placed.patch.old
            writes.append((_torch(placed.live), _torch(placed.patch.indices), _torch(bits)))

        def run() -> None:
            for live, indices, bits in writes:
                live.index_copy_(0, indices, bits)

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return _seconds(run)
        finally:
            torch.set_num_threads(threads)

    def _weights(self) -> list[tuple[str, Tensor]]:
        return [
            (spec.name, _torch(self.dense[spec.name]).view(torch.bfloat16).view(spec.shape))
            for spec in self.specs
        ]

    def _load_weights(self) -> None:
        with set_current_vllm_config(self.config), torch.no_grad():
            self.model.load_weights(self._weights())

    def _patches(self, deltas: Mapping[str, TensorDelta]) -> float:
        """vLLM's own sparse updates, without the check that no element is given twice."""
        patches = [
            CheckpointWeightPatch(
                name,
                delta.spec.shape,
                torch.bfloat16,
                _torch(self.dense[name][delta.indices]).view(torch.bfloat16),
                _torch(delta.indices),
            )
            for name, delta in deltas.items()
        ]
        with set_current_vllm_config(self.config):
            return _seconds(
                lambda: load_checkpoint_weight_patches(
                    self.model, patches, validate_unique_indices=False
                )
            )


def _torch(array: Any) -> Tensor:
    """An array as a tensor of signed integers; shares its memory."""
    writable: npt.NDArray[Any] = array
    if not writable.flags.writeable:
        writable = np.array(writable)
    return torch.from_numpy(writable.view(f"<i{writable.itemsize}"))


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
