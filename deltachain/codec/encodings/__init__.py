"""Encodings, one class each, and their registry by name.

To add an encoding in a package of your own, subclass :class:`SparseEncoding` and register an
instance in the entry point group ``deltachain.encodings``; see CONTRIBUTING.md.
"""

from collections.abc import Iterable
from typing import Final

from deltachain.codec.container import Segment, TensorRow
from deltachain.codec.encodings.base import EncodedTensor, Encoding
from deltachain.codec.encodings.dense import DenseEncoding, PlainEncoding, RawEncoding
from deltachain.codec.encodings.max.encoding import MaxEncoding
from deltachain.codec.encodings.sparse import OverwriteEncoding, SparseEncoding, StepEncoding
from deltachain.codec.frames import BucketWriter, TensorReader
from deltachain.delta import OldBits
from deltachain.errors import ConfigError, UnsupportedFormatError
from deltachain.name_registry import SHOWN, NameRegistry

__all__ = [
    "ENCODINGS",
    "GROUP",
    "BucketWriter",
    "EncodedTensor",
    "Encoding",
    "EncodingRegistry",
    "OldBits",
    "Segment",
    "SparseEncoding",
    "TensorReader",
    "TensorRow",
]

GROUP: Final = "deltachain.encodings"
"""Entry point group of encodings; each object is an :class:`Encoding` instance."""


class EncodingRegistry(NameRegistry[Encoding]):
    """Encodings by name; as a set, the names that this process can read and write."""

    def __init__(self, encodings: Iterable[Encoding]) -> None:
        # `Encoding` is abstract: an instance check is all that is made of it
        kind: type[Encoding] = Encoding  # type: ignore[type-abstract]
        super().__init__(GROUP, kind, "acme.zigzag", encodings)

    def get(self, name: str, *, key: str = "") -> Encoding:
        found = self.find(name)
        if found is not None:
            return found
        where = f"{key}: " if key else ""
        failure = self.failure(name)
        if failure is not None:
            raise UnsupportedFormatError(f"{where}{failure}", key=key, hint="repair that package")
        raise UnsupportedFormatError(
            f"{where}unknown encoding {name[:SHOWN]!r}",
            key=key,
            hint="install the package that provides this encoding, or upgrade deltachain",
        )

    def chosen(self, name: str) -> Encoding:
        found = self.find(name)
        if found is not None and found.sparse:
            return found
        others = (known.name for known in self.known.values() if known.sparse)
        failure = self.failure(name)
        raise ConfigError(
            f"encoding={name!r}: {failure or f'expected one of {tuple(others)}'}",
            hint="other encodings come with packages; install the one that provides it",
        )


ENCODINGS: Final = EncodingRegistry(
    (
        StepEncoding(),
        OverwriteEncoding(),
        DenseEncoding(),
        RawEncoding(),
        PlainEncoding(),
        MaxEncoding(),
    )
)
"""All encodings that this process can read and write."""
