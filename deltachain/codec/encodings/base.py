"""Interface of an encoding: one way to store the changes of a tensor in a part (FORMAT.md 4)."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from deltachain.codec.container import Segment, TensorRow
from deltachain.codec.frames import BucketWriter, TensorReader
from deltachain.delta import TensorDelta
from deltachain.kernels.arrays import Changes, StagedSteps, WindowPlace
from deltachain.types import Bits, TensorSpec


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """Result of :meth:`Encoding.encode`, for the row of the tensor.

    Attributes:
        gap: Size of a gap entry in bytes, 1 or 2; 0 without gaps. See FORMAT.md 4 for ``max``.
        segments: Segments of the tensor, in order.
    """

    gap: int = 0
    segments: Sequence[Segment] = ()


class Encoding(ABC):
    """One way to store a tensor's changes; instances are stateless.

    A part without compression may store a tensor as separate safetensors *arrays of its own*. Every
    other encoding divides the tensor into segments and appends to the streams of a bucket.

    Attributes:
        name: Name in the ``encoding`` of a row and the ``encodings`` of an edge.
        sparse: Whether it stores changed elements only. The digest of a row is then that of the new
            elements minus that of the old; otherwise that of the new elements alone.
        absolute: Whether it stores new bits, so that a reader needs no base; otherwise steps.
        own_arrays: Whether a tensor has arrays of its own, and no segments.
        checked: Whether :meth:`decode` itself checks all that :meth:`TensorDelta.validate` does.
        needs_old: Whether writer and reader need the old bits of the elements, those that did not
            change included: ``old`` of both is then set. Those of some tensors may do without: see
            :meth:`encodes_with_old` and :meth:`decodes_with_old`.
        compact: Whether the fewest bytes matter more than time: rows are stored in a short form,
            small tensors of a layer share digests, and tensors of all widths a bucket.
        stages: Whether readers stage its steps by :meth:`stage`, in one pass over the changes.
        columns: Whether :meth:`fits_segment` and :meth:`streams` also accept a segment whose fields
            are ``(n,)`` int64 arrays, for ``n`` segments or the sums of ``n`` rows. Their rows
            differ from the given one in name, counts and digest alone.
        shared: Streams in which a tensor with segments has one range for all of them.
    """

    name: ClassVar[str]
    sparse: ClassVar[bool]
    absolute: ClassVar[bool] = True
    own_arrays: ClassVar[bool] = False
    checked: ClassVar[bool] = False
    needs_old: ClassVar[bool] = False
    compact: ClassVar[bool] = False
    stages: ClassVar[bool] = False
    columns: ClassVar[bool] = False
    shared: ClassVar[frozenset[str]] = frozenset()

    def suits(self, spec: TensorSpec) -> bool:
        """Return whether ranks that share a tensor as usual can decode their shares.

        A publisher stores steps of other tensors.
        """
        return True

    def encodes_with_old(self, spec: TensorSpec) -> bool:
        """Return whether :meth:`encode` needs the old bits of a tensor."""
        return self.needs_old

    def decodes_with_old(self, row: TensorRow) -> bool:
        """Return whether :meth:`decode` needs the old bits of a tensor."""
        return self.needs_old

    def estimate(self, spec: TensorSpec, changes: Changes) -> int:
        """Estimate the size of a tensor's changes before compression, in bytes.

        A publisher compares the estimate with the size of the whole tensor.
        """
        return int(changes.indices.size) * (1 + spec.itemsize)

    @abstractmethod
    def fits_row(self, row: TensorRow, numel: int) -> bool:
        """Return whether the counts in a row are possible for a tensor of ``numel`` elements.

        Called before the segments are read.
        """

    def fits_segment(self, row: TensorRow, segment: Segment) -> bool:
        """Return whether the counts of a segment are possible; by default none are.

        The segment is known to lie inside its tensor, after the previous segment.
        """
        return False

    def streams(self, row: TensorRow, segments: tuple[Segment, ...]) -> Mapping[str, int]:
        """Return a tensor's length in each stream of its bucket, in the stream's unit.

        The unit is one bit for ``sign`` and ``exception``, and one byte for all other streams. By
        default, there are no streams.
        """
        return {}

    def arrays(self, row: TensorRow) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Return dtype and shape of each array of the tensor's own, by name; by default none."""
        return {}

    @abstractmethod
    def encode(self, delta: TensorDelta, out: BucketWriter) -> EncodedTensor:
        """Append the changes of one tensor.

        Args:
            delta: The changed elements.
            out: Streams of the bucket, or arrays of the tensor's own.

        Raises:
            ConfigError: This encoding cannot store deltas of this kind, or needs old bits.
        """

    @abstractmethod
    def decode(self, tensor: TensorReader) -> TensorDelta:
        """Decode the changes of one tensor.

        Lengths of streams and arrays are already checked; their values are untrusted. The caller
        calls :meth:`TensorDelta.validate` on the result, and may write into arrays of it that are
        writable.

        Raises:
            MalformedError: The streams contradict the row, or are not in canonical form.
        """

    def stage(
        self, tensor: TensorReader, box: WindowPlace, weights: Bits, key: tuple[int, int]
    ) -> StagedSteps:
        """Decode the steps of one tensor, and stage those in a box. Called only if ``stages``.

        Args:
            tensor: Reader of all segments with elements in the box.
            box: Elements held, and their positions in ``weights``.
            weights: ``(n,)`` live bits on the host; not written.
            key: Digest key of the tensor.

        Raises:
            MalformedError: The streams contradict the row, or are not in canonical form.
        """
        raise NotImplementedError
