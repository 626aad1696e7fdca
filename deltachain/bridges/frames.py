"""Frames of bytes: the changes of a tensor in one zstd frame, as slime, SkyRL and others have them.

*xor* is old XOR new of every byte. *overwrite* is a uint32 count, as many uint32 positions of
bytes, and the new bytes. Both have a checksum of all new bytes, which proves their base as well.
"""

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final

import blake3
import numpy as np
import numpy.typing as npt
import zstandard

from deltachain.bridges.dialect import ElementChange
from deltachain.codec.frames import inflate
from deltachain.errors import DigestMismatchError, MalformedError, UnsupportedFormatError
from deltachain.threads import Pool, cores
from deltachain.types import Bits, Buffer

Bytes = npt.NDArray[np.uint8]


def xor_bytes(change: ElementChange) -> Bytes:
    dense = np.zeros(change.spec.numel, change.new.dtype)
    dense[change.indices] = change.old ^ change.new
    return dense.view(np.uint8)


def deflated(content: Bytes) -> Bytes:
    return np.frombuffer(zstandard.ZstdCompressor(level=1).compress(content.data), np.uint8)


def xor_frames(changes: Iterable[ElementChange]) -> Iterator[tuple[ElementChange, Bytes]]:
    """Yield each tensor that changed with its frame, made by all cores."""
    changed = [change for change in changes if change.indices.size]
    make = lambda change: deflated(xor_bytes(change))  # noqa: E731
    with Pool(cores()) as pool:
        yield from zip(changed, pool.ordered(make, changed, ahead=2 * cores()), strict=True)


def _xxh3(data: Buffer) -> str:
    import xxhash  # noqa: PLC0415 - an extra

    return xxhash.xxh3_128_hexdigest(data)


CHECKSUMS: Final[dict[str, Callable[[Any], str]]] = {
    "xxh3-128": _xxh3,
    "blake3": lambda data: blake3.blake3(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
    "sha256": lambda data: hashlib.sha256(data).hexdigest(),
}


def checksum(algorithm: str, bits: Bits) -> str:
    return CHECKSUMS[algorithm](bits.view(np.uint8).data)


def _xored(frame: Buffer, old: Bytes, key: str) -> Bytes:
    return np.frombuffer(inflate(frame, old.nbytes, key=key), np.uint8) ^ old


def _overwritten(frame: Buffer, old: Bytes, key: str) -> Bytes:
    refused = partial(MalformedError, key=key)
    try:
        size = zstandard.frame_content_size(frame)
    except zstandard.ZstdError as exc:
        raise refused(f"{key}: {exc}") from exc
    count, rest = divmod(size - 4, 5)
    if not 0 <= count <= old.nbytes or rest:
        raise refused(f"{key}: a frame of {size} bytes for a tensor of {old.nbytes}")
    data = inflate(frame, size, key=key)
    positions = np.frombuffer(data, "<u4", count, 4)
    if int.from_bytes(data[:4], "little") != count or (count and positions.max() >= old.nbytes):
        raise refused(f"{key}: positions of other bytes than the tensor's {old.nbytes}")
    new = old.copy()
    new[positions] = np.frombuffer(data, np.uint8, count, 4 + 4 * count)
    return new


_APPLY: Final = {"xor": _xored, "overwrite": _overwritten}


def new_bits(
    frame: Bytes, old: Bits, *, encoding: str, algorithm: str, want: str, key: str
) -> Bits:
    """Return the bits that a frame makes of the old ones, once their checksum is proven.

    Raises:
        UnsupportedFormatError: The encoding or the checksum has an unknown name.
        MalformedError: The frame is cut short, or of a tensor of another size.
        DigestMismatchError: The frame, or its base, is another.
    """
    if encoding not in _APPLY or algorithm not in CHECKSUMS:
        raise UnsupportedFormatError(
            f"{key}: changes as {encoding!r} with checksums by {algorithm!r}",
            key=key,
            hint=f"known are {', '.join(_APPLY)} with {', '.join(CHECKSUMS)}",
        )
    new: Bits = _APPLY[encoding](frame.data, old.view(np.uint8), key).view(old.dtype)
    found = checksum(algorithm, new)
    if found != want:
        raise DigestMismatchError(
            f"{key}: the {algorithm} of the new bits",
            expected=want,
            actual=found,
            key=key,
            hint="the file is damaged, or its changes are of other weights: see --base",
        )
    return new
