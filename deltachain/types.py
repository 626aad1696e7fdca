"""Basic types: wire dtypes, tensor specs, versions and state digests.

Weights are handled as *bits*: a tensor of any dtype is a flat array of unsigned integers of the
same width, so that -0.0, NaN payloads and integers survive exactly.
"""

import math
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from deltachain.errors import ConfigError, TensorMismatchError

Version: TypeAlias = int  # position in a chain, counted from 0

Bits: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
"""Flat array of uint8, uint16, uint32 or uint64: one unsigned integer an element."""

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Anything bytes-like; ``collections.abc.Buffer`` once Python 3.12 is the oldest supported."""

Indices: TypeAlias = npt.NDArray[np.int64]  # flat indices into a full tensor, strictly increasing

WIRE_DTYPES: Final[dict[str, int]] = {
    name: nbytes
    for nbytes, names in (
        (1, "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0"),
        (2, "U16 I16 F16 BF16"),
        (4, "U32 I32 F32"),
        (8, "U64 I64 F64"),
    )
    for name in names.split()
}

BITS_DTYPES: Final[dict[int, np.dtype[Any]]] = {n: np.dtype(f"<u{n}") for n in (1, 2, 4, 8)}

MAX_DIMS: Final = 64  # so that computing the product of a shape is cheap
MAX_NUMEL: Final = 1 << 48  # elements: flat indices and byte counts fit into int64


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, wire dtype and shape of one tensor, as in the Hugging Face checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in WIRE_DTYPES:
            raise ConfigError(f"tensor {self.name!r}: dtype {self.dtype!r} has no wire form")
        if len(self.shape) > MAX_DIMS:
            raise ConfigError(f"tensor {self.name!r}: {len(self.shape)} dimensions")
        if any(dim < 0 for dim in self.shape) or math.prod(self.shape) > MAX_NUMEL:
            raise ConfigError(f"tensor {self.name!r}: shape {self.shape} is out of range")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return WIRE_DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def bits_dtype(self) -> np.dtype[Any]:
        return BITS_DTYPES[self.itemsize]


FoundSpec: TypeAlias = TensorSpec | tuple[str, tuple[int, ...]] | None
"""Dtype and shape of a tensor; ``None`` if there is no such tensor."""


def mismatch(name: str, found: FoundSpec, where: object, expected: FoundSpec, there: object) -> str:
    """Describe how a tensor of one name differs in dtype or shape in two places; empty if not."""
    if _form(found) == _form(expected):
        return ""
    return f"{name!r} is {_described(found)} in {where}, {_described(expected)} in {there}"


def check_spec(
    name: str,
    found: FoundSpec,
    where: object,
    expected: FoundSpec,
    there: object = "the chain",
    *,
    hint: str = "",
) -> None:
    message = mismatch(name, found, where, expected, there)
    if message:
        raise TensorMismatchError(message, tensor=name, hint=hint)


def _form(tensor: FoundSpec) -> tuple[str, tuple[int, ...]] | None:
    return (tensor.dtype, tensor.shape) if isinstance(tensor, TensorSpec) else tensor


def _described(tensor: FoundSpec) -> str:
    form = _form(tensor)
    return "missing" if form is None else f"{form[0]}{list(form[1])}"


_LANE: Final = 1 << 64


@dataclass(frozen=True, slots=True)
class StateDigest:
    """Additive digest of two 64-bit lanes over elements, tensors, shards and ranks (FORMAT.md 6).

    Addition and subtraction are modulo 2**64 a lane, so ``result - base`` of an update is the
    sum over the changed elements alone.
    """

    lane0: int = 0
    lane1: int = 0

    def __add__(self, other: "StateDigest") -> "StateDigest":
        return StateDigest((self.lane0 + other.lane0) % _LANE, (self.lane1 + other.lane1) % _LANE)

    def __sub__(self, other: "StateDigest") -> "StateDigest":
        return StateDigest((self.lane0 - other.lane0) % _LANE, (self.lane1 - other.lane1) % _LANE)

    def __str__(self) -> str:
        return f"{self.lane0:016x}{self.lane1:016x}"

    @classmethod
    def parse(cls, text: str) -> "StateDigest":
        if len(text) != 32 or any(c not in "0123456789abcdef" for c in text):
            raise ConfigError(f"{text!r} is not a state digest, expected 32 hexadecimal digits")
        return cls(int(text[:16], 16), int(text[16:], 16))
