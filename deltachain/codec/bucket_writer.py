"""Writer of the streams of one bucket during encoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from deltachain.codec.frames import BytePlane, FlatArray, StreamPiece
from deltachain.codec.old_bits import OldBits
from deltachain.types import Bits


@dataclass(frozen=True, slots=True)
class OwnArray:
    """A safetensors array that belongs to one tensor.

    Attributes:
        name: Name of the entry in the file.
        dtype: Wire dtype.
        shape: Dimensions.
        data: Bytes of the array.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]


@dataclass(slots=True)
class BucketWriter:
    """Collector of the stream contents of a bucket's tensors.

    Attributes:
        pieces: Contents by stream, in the order of the tensors.
        arrays: Arrays that belong to single tensors.
        notes: What an encoding keeps of the tensors before.
        old: Consecutive elements of the tensor before the change, all changed ones among them, for
            an encoding that needs them; ``None`` if the caller has none.
    """

    pieces: dict[str, list[StreamPiece]] = field(default_factory=dict)
    arrays: list[OwnArray] = field(default_factory=list)
    notes: dict[Any, Any] = field(default_factory=dict)
    old: OldBits | None = None

    def lengths(self) -> dict[str, int]:
        """Return the number of pieces of each stream."""
        return {stream: len(pieces) for stream, pieces in self.pieces.items()}

    def cut(self, lengths: Mapping[str, int]) -> None:
        """Remove the pieces that were put since :meth:`lengths` returned these."""
        for stream, pieces in self.pieces.items():
            del pieces[lengths.get(stream, 0) :]

    def extend(self, other: BucketWriter) -> None:
        """Append all streams of another writer."""
        for stream, pieces in other.pieces.items():
            self.pieces.setdefault(stream, []).extend(pieces)

    def put(self, stream: str, piece: FlatArray) -> None:
        """Append bytes to a stream, or booleans to a stream of bits."""
        self.pieces.setdefault(stream, []).append(piece)

    def put_planes(self, stream: str, values: Bits) -> None:
        """Append byte ``k`` of every element to ``stream.k``, since byte planes compress better."""
        for k in range(values.itemsize):
            self.pieces.setdefault(f"{stream}.{k}", []).append(BytePlane(values, k))

    def put_array(self, name: str, dtype: str, shape: tuple[int, ...], values: FlatArray) -> None:
        """Store an array as a separate entry."""
        self.arrays.append(OwnArray(name, dtype, shape, values.view(np.uint8)))
