"""Staging on all cores: the encoding ``max`` beside ``step``, and beside its floor.

Its floor is to read each old bit of the tensors from memory once: no decoder can know the classes
of elements that it did not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Final

import numpy as np

from deltachain.bench.codec_rows import StagingRow
from deltachain.bench.timing import Candidate, round_robin
from deltachain.codec import Part
from deltachain.codec.old_bits import OldBits
from deltachain.subscribe.targets.live import WholeTensor
from deltachain.subscribe.targets.patch import Patch, prepare_steps
from deltachain.threads import Pool, cores
from deltachain.types import Bits

WORDS: Final = 1 << 17
"""Words of 64 bits that a thread reads at a time."""


def measure(old: Mapping[str, Bits], parts: Mapping[str, bytes], rounds: int) -> StagingRow:
    """Decode and stage the ``step`` and the ``max`` part of an update, each tensor in a thread.

    Args:
        old: All bits of each tensor before the update, flat.
        parts: Parts of the update, by encoding.
        rounds: Number of repetitions, of which the best counts.
    """
    nnz = sum(row.nnz for row in Part.from_bytes(parts["step"]).rows.values())
    with Pool(cores()) as pool:
        candidates = [
            Candidate("floor", partial(_read, old, pool)),
            *(Candidate(name, partial(_stage, parts[name], old, pool)) for name in ("step", "max")),
        ]
        timings = round_robin(candidates, rounds)
    step, most, floor = (timings.best(name) / nnz * 1e9 for name in ("step", "max", "floor"))
    return StagingRow(step_ns=step, max_ns=most, floor_ns=floor)


def _stage(data: bytes, old: Mapping[str, Bits], pool: Pool) -> list[Patch]:
    part = Part.from_bytes(data)

    def one(name: str) -> Patch:
        return prepare_steps(WholeTensor(old[name]), part.reader(name, old=OldBits(old[name])))

    return list(pool.map(one, part.rows))


def _read(old: Mapping[str, Bits], pool: Pool) -> int:
    return sum(pool.map(lambda words: int(words.sum()), _words(old)))


def _words(old: Mapping[str, Bits]) -> Iterator[Bits]:
    for bits in old.values():
        whole = bits.view(np.uint8)
        words = whole[: whole.size & -8].view(np.uint64)
        for start in range(0, words.size, WORDS):
            yield words[start : start + WORDS]
