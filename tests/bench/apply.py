"""Benchmark of applying a delta: stage (while an engine serves) and swap (in its pause).

The swap writes staged bits in place; its baseline is a bare torch ``index_copy_`` of as many
elements. Staging reads the part, verifies every frame, decodes, gathers the old bits and proves the
state digest. Results are checked bit for bit before any timing.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from deltachain.codec import Change, Part, encode_part
from deltachain.delta import ABSOLUTE, STEP, TensorDelta
from deltachain.format.keys import digest_key
from deltachain.kernels import host
from deltachain.kernels.segments import StreamLayout, TensorStreams, pack
from deltachain.kernels.torch_kernels import bits_of
from deltachain.replica.batches import HostStager
from deltachain.replica.placements import Placement
from deltachain.replica.staged import NOTHING, RankStaged, stage
from deltachain.subscribe.targets.base import HeldVersion, write_all
from deltachain.subscribe.targets.tensor_patch import Patch
from deltachain.subscribe.targets.tensors import TensorTarget
from deltachain.types import Bits, Indices, StateDigest, TensorSpec
from tests.bench import report
from tests.bench.detect import Data
from tests.bench.report import Candidate, Timings, one_core, round_robin, say
from tests.gpu.diff import MOE_18K

TENSORS: Final = 16
NUMEL: Final = 1 << 22
DENSITY: Final = 0.012
ROUNDS: Final = 20
BARE: Final = "torch index_copy_, bare"
SWAP: Final = "swap"
UNDO: Final = "undo"
STAGE: Final = "stage: decode, gather, prove"
WHOLE: Final = "stage and swap"
HELD: Final = HeldVersion(chain="", version=1, epoch=0, manifest="", state="")


@dataclass(frozen=True, slots=True)
class TensorSample:
    spec: TensorSpec
    live: Tensor
    old: Bits
    new: Bits
    indices: Indices

    @property
    def bits(self) -> Bits:
        return bits_of(self.live).numpy().view(np.uint16)

    def put(self, bits: Bits) -> None:
        self.bits[self.indices] = bits


@dataclass(frozen=True, slots=True)
class Scene:
    tensors: Sequence[TensorSample]
    target: TensorTarget
    data: bytes
    change: StateDigest

    @classmethod
    def generate(cls, tensors: int, numel: int, density: float) -> "Scene":
        made, changes, total = [], [], StateDigest()
        for number in range(tensors):
            data = Data.generate(numel, density, seed=number)
            spec = TensorSpec(f"model.layers.{number}.weight", "BF16", (numel,))
            live = torch.from_numpy(data.snapshot.view(np.int16)).view(torch.bfloat16)
            new = data.current[data.indices]
            made.append(TensorSample(spec, live, data.old, new, data.indices))
            key = digest_key(spec)
            change = host.digest_at(key, data.indices, new)
            change -= host.digest_at(key, data.indices, data.old)
            delta = TensorDelta(spec=spec, indices=data.indices, values=new - data.old)
            changes.append(Change(delta, change))
            total += change
        target = TensorTarget({tensor.spec.name: tensor.live for tensor in made})
        target.bind({tensor.spec.name: tensor.spec for tensor in made}, {})
        return cls(made, target, encode_part(changes).data, total)

    @property
    def nnz(self) -> int:
        return sum(tensor.indices.size for tensor in self.tensors)

    @property
    def numel(self) -> int:
        return sum(tensor.spec.numel for tensor in self.tensors)

    def put_old(self) -> None:
        for tensor in self.tensors:
            tensor.put(tensor.old)

    def put_new(self) -> None:
        for tensor in self.tensors:
            tensor.put(tensor.new)

    def stage(self) -> list[Patch]:
        patches = [self.target.prepare(delta) for delta in Part.from_bytes(self.data)]
        if sum((patch.change for patch in patches), StateDigest()) != self.change:
            raise ArithmeticError("the staged bits have another digest")
        return patches

    def check(self) -> list[Patch]:
        self.put_old()
        patches = self.stage()
        self.target.write(patches, HELD)
        for wanted in ("new", "old"):
            for tensor in self.tensors:
                if not np.array_equal(tensor.bits[tensor.indices], getattr(tensor, wanted)):
                    raise ArithmeticError(f"{tensor.spec.name} does not hold its {wanted} bits")
            self.target.write([patch.undo() for patch in patches], HELD)
        return patches


def measure(scene: Scene, rounds: int) -> Timings:
    with one_core():
        patches = scene.check()
        backwards = [patch.undo() for patch in patches]
        live = [bits_of(tensor.live.data) for tensor in scene.tensors]  # not counted by torch
        new = [
            (torch.from_numpy(t.indices), torch.from_numpy(t.new.view(np.int16)))
            for t in scene.tensors
        ]

        def bare() -> None:
            for bits, (indices, values) in zip(live, new, strict=True):
                bits.index_copy_(0, indices, values)

        candidates = [
            Candidate(BARE, bare, scene.put_old),
            Candidate(SWAP, partial(scene.target.write, patches, HELD), scene.put_old),
            Candidate(UNDO, partial(scene.target.write, backwards, HELD), scene.put_new),
            Candidate(STAGE, scene.stage, scene.put_old),
            Candidate(WHOLE, lambda: scene.target.write(scene.stage(), HELD), scene.put_old),
        ]
        return round_robin(candidates, rounds)


def count_bytes(scene: Scene) -> dict[str, float]:
    """Count the bytes a changed element that staging a scene reads and makes.

    ``wire`` is the part; ``host`` adds its inflated streams and the arrays of staging (indices,
    values, old and new bits), each once; ``device`` is what crosses to weights on a device of an
    engine: streams and their table.
    """
    part = Part.from_bytes(scene.data)
    inflated = sum(sum(row.raw) for row in part.directory.streams)
    deltas = sum(delta.nbytes for delta in part)
    kept = sum(tensor.old.nbytes + tensor.new.nbytes for tensor in scene.tensors)
    wire = len(scene.data)
    host_bytes = wire + inflated + deltas + kept
    specs = {tensor.spec.name: tensor.spec for tensor in scene.tensors}
    live = {t.spec.name: [(("", 0), Placement(t.live, 0, (1,)))] for t in scene.tensors}
    stager = HostStager(live, specs)
    read = [one for group in stager.groups([(0, part)])[0] for one in stager.read(group)]
    streams: dict[StreamLayout, list[TensorStreams]] = defaultdict(list)
    for layout, some in chain.from_iterable(read):
        streams[layout].append(some)
    crossing = sum(pack(layout, some).buffer.nbytes for layout, some in streams.items())
    sizes = {"wire": wire, "host": host_bytes, "device": crossing}
    return {name: nbytes / scene.nnz for name, nbytes in sizes.items()}


SMALLER: Final = 4096
"""Divisor of the sizes of a mixture of experts, so that what is measured is a cost a tensor."""


@dataclass(frozen=True, slots=True)
class ManyTensors:
    """A rank's share of 18,721 tensors of a few elements, on the host, and the next version."""

    stager: HostStager
    data: bytes
    live: Mapping[str, Tensor]
    new: Mapping[str, Bits]

    @classmethod
    def generate(cls, encoding: str) -> "ManyTensors":
        rng = np.random.default_rng(0)
        specs, live, new, changes = {}, {}, {}, []
        for number, numel in enumerate(MOE_18K.scaled(SMALLER).numels):
            name = f"model.layers.{number // 390}.mlp.experts.{number % 390}.weight"
            specs[name] = TensorSpec(name, "BF16", (numel,))
            old = rng.integers(0, 1 << 16, numel, np.uint16)
            indices = np.unique(rng.integers(0, numel, 1 + int(DENSITY * numel)))
            values = rng.choice(np.array([1, 0xFFFF], np.uint16), indices.size)
            new[name] = old.copy()
            new[name][indices] += values
            absolute = encoding == "overwrite"
            delta = TensorDelta(
                spec=specs[name],
                indices=indices,
                values=new[name][indices] if absolute else values,
                absolute=ABSOLUTE if absolute else STEP,
            )
            changes.append(Change(delta, StateDigest()))
            live[name] = torch.from_numpy(old.view(np.int16))
        places = {name: [(("", 0), Placement(bits, 0, (1,)))] for name, bits in live.items()}
        stager = HostStager(places, specs)
        stager.warm_up()
        return cls(stager, encode_part(changes).data, live, new)

    def stage(self) -> RankStaged:
        groups, _ = self.stager.groups([(0, Part.from_bytes(self.data))])
        return stage(iter(groups), lambda _: NOTHING, 1 << 40, threads=1)

    def read(self) -> None:
        """Do what a stage does on the host for a device: all but decoding."""
        groups, _ = self.stager.groups([(0, Part.from_bytes(self.data))])
        for group in groups:
            for found in self.stager.read(group):
                streams: dict[StreamLayout, list[TensorStreams]] = defaultdict(list)
                for layout, some in found:
                    streams[layout].append(some)
                for layout, several in streams.items():
                    pack(layout, several)


def measure_many(rounds: int) -> dict[str, float]:
    """Return the best processor time of each phase, in microseconds a tensor."""
    best: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        start = time.process_time()
        found = work()
        taken = (time.process_time() - start) / count * 1e6
        best[name] = min(taken, best.get(name, taken))
        return found

    with one_core():
        for encoding in ("step", "overwrite"):
            many = ManyTensors.generate(encoding)
            count = len(many.live)
            for _ in range(rounds):
                timed(f"{encoding}: open the object", partial(Part.from_bytes, many.data))
                timed(f"{encoding}: open, read for a device", many.read)
                staged = timed(f"{encoding}: stage", many.stage)
                timed(f"{encoding}: swap", partial(write_all, staged.placed, 1))
                for name, bits in many.live.items():
                    if not np.array_equal(bits.numpy().view(np.uint16), many.new[name]):
                        raise ArithmeticError(f"{name} does not hold its new bits")
                timed(f"{encoding}: undo", partial(write_all, list(staged.undoes()), 0))
    return best


def run() -> Mapping[str, Any]:
    say(f"{TENSORS} tensors of {NUMEL / 1e6:.1f} M elements, {DENSITY:.2%} changed")
    scene = Scene.generate(TENSORS, NUMEL, DENSITY)
    timings = measure(scene, ROUNDS)
    rows = []
    for name in timings.seconds:
        times = None if name in (STAGE, WHOLE) else 1 / timings.ratio(name, BARE)
        row = report.speeds(name, timings, 2 * scene.numel)
        rows.append(row | {"ns": row["best_s"] / scene.nnz * 1e9, "times_bare": times})
    return {
        "benchmark": "apply",
        "numel": scene.numel,
        "nnz": scene.nnz,
        "nbytes": len(scene.data),
        "rounds": ROUNDS,
        "rows": rows,
        "bytes_a_change": count_bytes(scene),
        "many_tensors_us": measure_many(ROUNDS),
        "machine": report.machine(),
    }


def main(*, json_output: bool) -> int:
    result = run()
    title = f"Write {result['nnz'] / 1e6:.2f} M of {result['numel'] / 1e6:.0f} M bf16 elements"
    table = report.grid(title, "", "best ns a change", "GB/s", "of bare")
    for row in result["rows"]:
        bare = "" if row["times_bare"] is None else f"{row['times_bare']:.2f}"
        table.add_row(row["name"], f"{row['ns']:.2f}", f"{row['gb_per_s']:.1f}", bare)
    counts = report.grid("Memory", "bytes a changed element", "")
    places = {"wire": "on the wire", "host": "on the host", "device": "to weights on a device"}
    for name, place in places.items():
        counts.add_row(place, f"{result['bytes_a_change'][name]:.2f}")
    many = report.grid(f"{len(MOE_18K.numels):,} small tensors", "", "processor us a tensor")
    for name, us in result["many_tensors_us"].items():
        many.add_row(name, f"{us:.2f}")
    report.emit(result, [table, counts, many], json_output=json_output)
    return 0
