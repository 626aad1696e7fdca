"""Encodings, one class each, and their registry by name.

To add an encoding in a package of your own, subclass :class:`SparseEncoding` and register an
instance in the entry point group ``deltachain.encodings``; see CONTRIBUTING.md.
"""

from deltachain.codec.container import Segment, TensorRow
from deltachain.codec.encodings.base import EncodedTensor, Encoding
from deltachain.codec.encodings.registry import ENCODINGS, GROUP, EncodingRegistry
from deltachain.codec.encodings.sparse import SparseEncoding
from deltachain.codec.frames import BucketWriter, TensorReader
from deltachain.delta import OldBits

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
