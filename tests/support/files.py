"""Checkpoint files and containers in memory, for tests."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deltachain.checkpoint import allocate, creating
from deltachain.codec.container import ReadAt
from deltachain.types import Buffer, TensorSpec


def write_weights(
    file: Path, specs: Iterable[TensorSpec], read: Callable[[TensorSpec], npt.NDArray[Any]]
) -> None:
    with creating(file) as partial:
        ordered = allocate(partial, specs)
        with partial.open("r+b") as out:
            out.seek(-sum(spec.nbytes for spec in ordered), os.SEEK_END)
            for spec in ordered:
                out.write(np.ascontiguousarray(read(spec)).view(np.uint8).data)


def reader_of(data: Buffer) -> ReadAt:
    view = memoryview(data)
    return lambda start, length: view[start : start + length]
