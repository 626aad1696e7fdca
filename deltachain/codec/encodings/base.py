"""What an encoding is: one way to store the changes of a tensor in a part (FORMAT.md 4)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from deltachain.codec.bucket_writer import BucketWriter
from deltachain.codec.directory import Segment, TensorRow
from deltachain.codec.tensor_reader import TensorReader
from deltachain.delta import TensorDelta
from deltachain.kernels.reference import Changes
from deltachain.types import TensorSpec


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """What :meth:`Encoding.encode` tells of a tensor for its row.

    Attributes:
        gap: Bytes of a gap entry, 1 or 2; 0 without gaps.
        segments: Its segments, in order.
    """

    gap: int = 0
    segments: Sequence[Segment] = ()


class Encoding(ABC):
    """One way to store a tensor's changes; instances have no state.

    A part without compression may store a tensor as safetensors *arrays of its own*. Every other
    encoding cuts the tensor into segments and appends to the streams of a bucket.

    Attributes:
        name: In the ``encoding`` of a row and the ``encodings`` of an edge.
        sparse: Whether it gives the changed elements. The digest of a row is then that of the new
            elements less that of the old; else it is that of the new ones alone.
        absolute: Whether it gives new bits, so that a reader needs no base; else it gives steps.
        own_arrays: Whether a tensor has arrays of its own, and no segments.
    """

    name: ClassVar[str]
    sparse: ClassVar[bool]
    absolute: ClassVar[bool] = True
    own_arrays: ClassVar[bool] = False

    def estimate(self, spec: TensorSpec, changes: Changes) -> int:
        """About the bytes of a tensor's changes, before compression.

        A publisher compares it with the bytes of the whole tensor.
        """
        return int(changes.indices.size) * (1 + spec.itemsize)

    @abstractmethod
    def fits_row(self, row: TensorRow, numel: int) -> bool:
        """Whether the counts in a row are possible, in a tensor of ``numel`` elements.

        Its segments are not read yet.
        """

    def fits_segment(self, row: TensorRow, segment: Segment) -> bool:
        """Whether the counts of a segment are possible.

        That the segment lies inside its tensor, after the one before, is known.
        """
        raise NotImplementedError(f"{self.name} has no segments, not {segment} of {row.name}")

    def streams(self, row: TensorRow, segments: tuple[Segment, ...]) -> Mapping[str, int]:
        """How far a tensor advances each stream of its bucket, in the stream's unit.

        The unit is one bit for ``sign`` and ``exception``, and one byte for all others.
        """
        raise NotImplementedError(f"{self.name} has no streams, not {segments} of {row.name}")

    def arrays(self, row: TensorRow) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of each array of the tensor's own, by name."""
        raise NotImplementedError(f"{self.name} has no arrays, not of {row.name}")

    @abstractmethod
    def encode(self, delta: TensorDelta, out: BucketWriter) -> EncodedTensor:
        """Append the changes of one tensor.

        Raises:
            ConfigError: The delta is not of the kind that this encoding stores.
        """

    @abstractmethod
    def decode(self, tensor: TensorReader) -> TensorDelta:
        """Read the changes of one tensor back.

        Lengths of streams and arrays are checked before; every value in them may be anything.
        :meth:`TensorDelta.validate` is called on the result.

        Raises:
            MalformedError: The streams contradict the row, or are not written the one way.
        """
