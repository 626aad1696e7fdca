"""Object digests, and the keys of the state digest (FORMAT.md 6)."""

from __future__ import annotations

from functools import lru_cache
from typing import Final, TypeAlias

from blake3 import blake3

from deltachain.types import TensorSpec

DigestKey: TypeAlias = tuple[int, int]
"""Keys of the two lanes of a tensor's state digest, 64 bits each."""

DIGEST_HEX: Final = 64
"""Hexadecimal digits of an object digest."""


def object_digest(data: bytes | bytearray | memoryview) -> str:
    """Return the blake3 of ``data`` as 64 hexadecimal digits."""
    return blake3(data, max_threads=blake3.AUTO if len(data) > 1 << 20 else 1).hexdigest()


@lru_cache(maxsize=1 << 16)
def digest_key(spec: TensorSpec) -> DigestKey:
    """Derive the two lane keys of a tensor from its name, wire dtype and shape."""
    shape = ",".join(map(str, spec.shape))
    seed = blake3(f"{spec.dtype} {shape} {spec.name}".encode()).digest(length=16)
    return int.from_bytes(seed[:8], "little"), int.from_bytes(seed[8:], "little")
