"""Deltas to bytes and back: the payload parts of FORMAT.md."""

from deltachain.codec.decode import Part
from deltachain.codec.directory import ENCODINGS
from deltachain.codec.encode import Change, EncodedPart, encode_part

__all__ = ["ENCODINGS", "Change", "EncodedPart", "Part", "encode_part"]
