"""Estimate of a chain's costs from the shapes of a model: bytes, seconds, memory, disk, dollars.

Speeds assume one core for each rank and weights in host memory. Phases are added up, although they
overlap, so seconds are upper bounds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from deltachain.chain.ancestry import SPANS
from deltachain.chain.anchor_rule import ANCHOR_FACTOR, MOST_VERSIONS
from deltachain.chain.fetch import MOST_HELD
from deltachain.chain.upload import PARTS_ON_THE_WAY, SMALL_PART_NBYTES, anchor_part_nbytes
from deltachain.errors import ConfigError
from deltachain.publish.config import PublishConfig
from deltachain.subscribe.config import SubscribeConfig
from deltachain.subscribe.targets.folder import BUDGET
from deltachain.types import TensorSpec


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of BENCHMARKS.md, in the order of their line, by its section and begin."""

    section: str
    line: str
    values: tuple[float, ...]


DENSITIES: Final = (0.0002, 0.0013, 0.007, 0.012, 0.025)  # of bits of a change in bf16

BITS: Final = {
    "step": Measured("Size", "deltachain step", (17.66, 13.10, 10.53, 9.76, 8.79)),
    "max": Measured("Size", "deltachain max", (12.15, 9.09, 7.54, 7.11, 6.52)),
    "overwrite": Measured("Size", "deltachain overwrite", (27.97, 23.44, 20.58, 19.66, 18.43)),
    "raw": Measured("Size", "deltachain raw", (61.20, 50.03, 48.41, 48.24, 48.12)),
}
SPEEDS: Final = {
    0.0002: Measured("Size", "0.02%", (63.1, 78.0, 1.3, 7.1, 66.8, 68.6, 105.3, 95.2)),
    0.0013: Measured("Size", "0.13%", (40.7, 61.6, 1.2, 6.8, 44.9, 56.8, 83.3, 78.9)),
    0.012: Measured("Size", "1.20%", (12.8, 26.4, 0.7, 4.7, 13.9, 23.8, 23.5, 32.3)),
    0.025: Measured("Size", "2.50%", (7.4, 15.5, 0.5, 3.5, 7.8, 14.1, 14.9, 18.4)),
}
"""GB of dense bf16 a second, encode and decode, in the order of :data:`BITS`."""

FP8: Final = Measured("Size", "deltachain step", (17.66, 13.10, 10.53, 9.76, 8.79, 13.19))
"""Bits a change of bf16; the last value is of fp8, at the density of the fourth."""

CHANGE: Final = Measured("Size", "deltachain step", (13.0, 6.3))  # ns, encode and decode
DIFF: Final = Measured("Detect", "numba diff_", (10.8, 12.4))  # ms, GB/s
STAGE: Final = Measured("Apply", "stage: decode, gather, prove", (14.93,))  # ns a change
SWAP: Final = Measured("Apply", "swap", (7.60,))  # ns a change
DENSE: Final = Measured("Anchors", "487 MB of bf16 weights in a folder of /dev/shm:", (0.67,))
ANCHOR: Final = Measured("Anchors", "anchor alone", (293, 1.66, 2))  # ms, GB/s, threads
NEWCOMER: Final = Measured("Anchors", "newcomer", (268, 1.81, 2))

CORE_NBYTES: Final = 64 << 20  # of windows and frames that a core decodes and compares
KEPT_VERSIONS: Final = 1024  # that pruning keeps by default


@dataclass(frozen=True, slots=True)
class CostSettings:
    density: float = 0.01  # changed share of the elements in a step
    encoding: str = "step"
    replicas: int = 8
    ranks: int = 1  # of the trainer
    engine_ranks: int = 8  # of a replica
    link: float = 125e6  # bytes a second between store and trainer, store and each replica
    every_s: float = 30.0  # between two steps
    egress: float = 0.09  # dollars a GB that leaves the store
    cores: int = 16  # of a machine, each with windows of a tensor

    def __post_init__(self) -> None:
        is_rate = min(self.link, self.every_s) > 0 and 0 <= self.egress < math.inf
        if not (0 < self.density <= 1 and is_rate and self.encoding in BITS):
            raise ConfigError(
                f"{self}: a value is out of range",
                hint=f"encoding is one of {', '.join(BITS)}; density is above 0 and at most 100%; "
                "link and every are above 0, egress at least 0",
            )


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes, seconds in all and of each phase, and dollars of egress."""

    nbytes: int
    seconds: float
    phases: Mapping[str, float]
    dollars: float


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of memory in a step, of memory at most, and of disk at most."""

    memory: int
    most: int
    disk: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """Costs of a run; ``full`` is a copy of all weights in bf16 through the same store."""

    numel: int
    tensors: int
    nbytes: int
    costs: Mapping[str, Cost]
    rooms: Mapping[str, Footprint]
    anchor_every: int  # versions
    period_s: float  # between two versions: that of steps, unless encoders or links are slower
    day: float  # dollars of egress
    full_day: float


def estimate(specs: Sequence[TensorSpec], run: CostSettings) -> Estimate:
    numel, dense = sum(spec.numel for spec in specs), sum(spec.nbytes for spec in specs)
    changes, most = run.density * numel, _anchor_nbytes(specs)
    size = min(_delta_nbytes(specs, run), most)
    deltas = min(math.ceil((ANCHOR_FACTOR - 1) * most / size), MOST_VERSIONS)
    way, decode = most + deltas * size, _ns(run, side=1) * 1e-9
    stage = decode + (STAGE.values[0] - CHANGE.values[1]) * 1e-9
    unpack = dense / _a_core(NEWCOMER) + deltas * changes * decode
    full = 2 * numel / run.link

    def cost(nbytes: float, readers: int, **phases: float) -> Cost:
        dollars = readers * nbytes / 1e9 * run.egress
        return Cost(round(nbytes), sum(phases.values()), phases, dollars)

    costs = {
        "step": cost(
            size,
            run.replicas,
            diff=dense / run.ranks / (DIFF.values[1] * 1e9),
            encode=changes / run.ranks * _ns(run, side=0) * 1e-9,
            upload=size / run.link,
            fetch=size / run.link,
            stage=changes / run.engine_ranks * stage,
            swap=changes / run.engine_ranks * SWAP.values[0] * 1e-9,
        ),
        "anchor": cost(most, 0, encode=dense / run.ranks / _a_core(ANCHOR), upload=most / run.link),
        "newcomer": cost(way, 1, fetch=way / run.link, stage=unpack / run.engine_ranks),
        "full": cost(2 * numel, run.replicas, upload=full, fetch=full),
    }
    took = costs["step"].phases
    period = max(run.every_s, took["encode"] + took["upload"], took["fetch"] + took["stage"])
    day = 86400 / period * costs["step"].dollars
    full_day = 86400 / max(run.every_s, full) * costs["full"].dollars
    rooms = _rooms(specs, run, costs)
    return Estimate(numel, len(specs), dense, costs, rooms, deltas, period, day, full_day)


def _rooms(
    specs: Sequence[TensorSpec], run: CostSettings, costs: Mapping[str, Cost]
) -> dict[str, Footprint]:
    dense = sum(spec.nbytes for spec in specs)
    step, anchor, newcomer = (
        costs["step"].nbytes,
        costs["anchor"].nbytes,
        costs["newcomer"].nbytes,
    )
    old = run.density * dense  # of the changed elements
    indices = 8 * run.density * sum(spec.numel for spec in specs)
    patches = indices + 2 * old
    publish, follow = PublishConfig(url="-"), SubscribeConfig(url="-")
    part, parts, shard = publish.part_nbytes, PARTS_ON_THE_WAY + 1, dense / run.ranks
    # The diff has indices, old and new bits; parts on the way have steps and streams beside them.
    flight = patches / run.ranks + min(4 * old / run.ranks, parts * part)
    beside = math.ceil(costs["anchor"].seconds / run.every_s)  # versions during an anchor
    kept = min(publish.anchor_memory * shard, beside * (indices + old) / run.ranks)
    late = min(shard, parts * anchor_part_nbytes(int(shard), part)) + kept
    memory, most = round(shard + flight), round(shard + flight + late)
    windows, tensor = run.cores * CORE_NBYTES, max(spec.nbytes for spec in specs)
    folding = windows + min(dense, parts * SMALL_PART_NBYTES)
    skip = min(SPANS[-1] * (indices + old), folding)
    writing = windows + min(step, MOST_HELD) + min(patches, 3 * BUDGET)
    budget = run.engine_ranks * follow.stage_budget
    undo = min(follow.undo_applies * patches, budget)
    whole = min(max(patches, dense), budget) + undo
    anchors = 2 + KEPT_VERSIONS * step // max(newcomer - anchor, 1)
    return {
        "trainer": Footprint(run.ranks * memory, run.ranks * most, 0),
        "a rank of it": Footprint(memory, most, 0),
        "maintainer": Footprint(round(skip), folding + 2 * tensor, newcomer),
        "folder": Footprint(round(writing), round(writing), dense + newcomer),
        "engine": Footprint(round(min(patches, budget) + undo), round(whole), newcomer),
        "store": Footprint(0, 0, KEPT_VERSIONS * step + anchors * anchor),
    }


def _delta_nbytes(specs: Sequence[TensorSpec], run: CostSettings) -> float:
    bits = np.interp(math.log(run.density), np.log(DENSITIES), BITS[run.encoding].values)
    more = FP8.values[5] / FP8.values[3]
    numel = sum(spec.numel * (more if spec.itemsize == 1 else 1) for spec in specs)
    return run.density * float(bits) / 8 * numel


def _anchor_nbytes(specs: Sequence[TensorSpec]) -> float:
    """Return the size of an anchor: 16-bit weights are known to be compressed, others not."""
    return sum(spec.nbytes * (DENSE.values[0] if spec.itemsize == 2 else 1) for spec in specs)


def _ns(run: CostSettings, *, side: int) -> float:
    """Return the time of a change on one core: encoding is side 0, decoding side 1."""
    column = 2 * list(BITS).index(run.encoding) + side
    ns = [2 / (density * speed.values[column]) for density, speed in SPEEDS.items()]
    return float(np.interp(math.log(run.density), np.log(list(SPEEDS)), ns))


def _a_core(speed: Measured) -> float:  # bytes a second
    return speed.values[1] * 1e9 / speed.values[2]
