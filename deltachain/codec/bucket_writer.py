"""Streams of one bucket, while its tensors are encoded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from deltachain.types import Bits

FlatArray: TypeAlias = npt.NDArray[Any]
"""Any array of one dimension."""


@dataclass(frozen=True, slots=True)
class OwnArray:
    """A safetensors array that belongs to one tensor.

    Attributes:
        name: Of the entry in the file.
        dtype: Wire dtype.
        shape: Dimensions.
        data: Its bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class BucketWriter:
    """Collects what the encodings of a bucket's tensors append to its streams.

    Attributes:
        pieces: By stream, in the order of the tensors.
        arrays: Of tensors that have arrays of their own.
    """

    pieces: dict[str, list[FlatArray]] = field(default_factory=dict)
    arrays: list[OwnArray] = field(default_factory=list)

    def put(self, stream: str, piece: FlatArray) -> None:
        """Append bytes to a stream; booleans, if it is one of bits."""
        self.pieces.setdefault(stream, []).append(piece)

    def put_planes(self, stream: str, values: Bits) -> None:
        """Append byte ``k`` of every element to ``stream.k``: like bytes compress better."""
        planes = np.ascontiguousarray(values).view(np.uint8).reshape(-1, values.itemsize)
        for k in range(values.itemsize):
            self.put(f"{stream}.{k}", planes[:, k])

    def put_array(self, name: str, dtype: str, shape: tuple[int, ...], values: FlatArray) -> None:
        """Store an array as an entry of its own."""
        self.arrays.append(OwnArray(name, dtype, shape, values.view(np.uint8)))
