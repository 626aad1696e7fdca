"""The encoding of another package, in one file: wrapping steps as zigzag numbers, in byte planes.

``test_other_packages.py`` installs it, and nothing in deltachain knows of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from deltachain.codec.encodings import (
    BucketWriter,
    Segment,
    SparseEncoding,
    TensorReader,
    TensorRow,
)
from deltachain.types import Bits


@dataclass(frozen=True, slots=True)
class ZigzagEncoding(SparseEncoding):
    """Steps 1, -1, 2, -2, ... as 2, 1, 4, 3, ...: small ones have zeros in all planes but one."""

    name: ClassVar[str] = "acme.zigzag"
    absolute: ClassVar[bool] = False

    @override
    def value_streams(self, row: TensorRow, segments: tuple[Segment, ...]) -> Mapping[str, int]:
        nnz = sum(segment.nnz for segment in segments)
        return {f"acme.zigzag.{k}": nnz for k in range(row.itemsize)}

    @override
    def put_values(self, values: Bits, out: BucketWriter) -> tuple[int, int]:
        one, top = values.dtype.type(1), values.dtype.type(8 * values.itemsize - 1)
        out.put_planes("acme.zigzag", (values << one) ^ -(values >> top))
        return 0, 0

    @override
    def read_values(self, tensor: TensorReader) -> Bits:
        found = tensor.planes("acme.zigzag", tensor.spec.itemsize)
        one = found.dtype.type(1)
        steps: Bits = (found >> one) ^ -(found & one)
        return steps


ZIGZAG = ZigzagEncoding()
