"""Checkpoint files and containers in memory, for tests."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deltachain.checkpoint import begin, creating
from deltachain.codec.container import ReadAt
from deltachain.types import Buffer, TensorSpec


def write_weights(
    file: Path, specs: Iterable[TensorSpec], read: Callable[[TensorSpec], npt.NDArray[Any]]
) -> None:
    with creating(file) as partial:
        named = {spec.name: spec for spec in specs}
        starts = begin(partial, named.values())
        with partial.open("r+b") as out:
            for name, start in starts.items():
                out.seek(start)
                out.write(np.ascontiguousarray(read(named[name])).view(np.uint8).data)


def reader_of(data: Buffer) -> ReadAt:
    view = memoryview(data)
    return lambda start, length: view[start : start + length]
