"""Object digests, and the keys of the state digest (FORMAT.md 6)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final, TypeAlias

from blake3 import blake3

from deltachain.types import TensorSpec

DigestKey: TypeAlias = tuple[int, int]
"""Keys of the two lanes of a tensor's state digest, 64 bits each."""

DIGEST_HEX: Final = 64
"""Hexadecimal digits of an object digest."""

THREADED: Final = 4 << 20
"""Bytes above which an object is hashed in threads: smaller ones, of which every frame is one, are
hashed by several threads at a time, and would wait for one another."""


def object_digest(data: bytes | bytearray | memoryview) -> str:
    """Return the blake3 of ``data`` as 64 hexadecimal digits."""
    return blake3(data, max_threads=blake3.AUTO if len(data) > THREADED else 1).hexdigest()


def digest_of_pieces(pieces: Iterable[bytes | memoryview], *, threads: int = 1) -> str:
    """Return the blake3 of consecutive pieces of an object; each is hashed while it is in cache."""
    digest = blake3(max_threads=threads)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


@lru_cache(maxsize=1 << 16)
def digest_key(spec: TensorSpec) -> DigestKey:
    """Derive the two lane keys of a tensor from its name, wire dtype and shape."""
    shape = ",".join(map(str, spec.shape))
    seed = blake3(f"{spec.dtype} {shape} {spec.name}".encode()).digest(length=16)
    return int.from_bytes(seed[:8], "little"), int.from_bytes(seed[8:], "little")
