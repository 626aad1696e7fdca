"""Encoding and decoding of deltas: the payload parts of FORMAT.md."""

from deltachain.codec.decode import Part
from deltachain.codec.encode import Change, EncodedPart, encode_part
from deltachain.codec.encodings import ENCODINGS

__all__ = ["ENCODINGS", "Change", "EncodedPart", "Part", "encode_part"]
