"""Fetch and proof of one part."""

from __future__ import annotations

from functools import partial
from typing import Final

from deltachain.codec import Part
from deltachain.errors import (
    DigestMismatchError,
    FormatError,
    ObjectNotFoundError,
    UnsupportedFormatError,
)
from deltachain.format.digest import digest_of_pieces, object_digest
from deltachain.format.documents import ObjectRef
from deltachain.store import Store
from deltachain.store.base import check_nbytes, not_found
from deltachain.types import Buffer

LOST: Final = (
    "a lifecycle rule or a user removed it: restore it, give `deltachain maintain --copy` a folder "
    "that follows this chain, or restart the publisher, whose next anchor makes it unnecessary"
)
"""Hint for a missing part without an alternative plan."""

LARGE: Final = 8 << 20
"""Size of an object in bytes above which fresh memory for it costs more than to read it twice."""

PIECE: Final = 1 << 20
"""Bytes of a large object that are read at a time: they stay in cache while they are hashed."""


def fetch_part(
    store: Store, ref: ObjectRef, corrupt: list[str] | None = None, *, hold: bool = True
) -> Part:
    """Fetch and verify a part, once more if it is corrupt.

    Args:
        store: Store of the part.
        ref: Key, size and digests of the part.
        corrupt: List that the key is appended to if the first read was corrupt.
        hold: Whether to hold a large object in memory even if the store has cheap ranges. Frames
            of an object that is not held are read and verified again as they are decoded.

    Raises:
        ObjectNotFoundError: The object is gone.
        DigestMismatchError: The object does not have this digest.
        MalformedError: The object has this digest but violates FORMAT.md.
    """
    in_store = not hold and ref.nbytes > LARGE and store.capabilities.cheap_ranges
    get = _in_store if in_store else _held
    try:
        return get(store, ref)
    except UnsupportedFormatError:
        raise
    except FormatError:
        if corrupt is not None:
            corrupt.append(ref.key)
        return get(store, ref)


def _held(store: Store, ref: ObjectRef) -> Part:
    """Read an object into memory, verify it and open it as a part."""
    data = _read(store, ref)
    _check_digest(ref.key, ref.blake3, object_digest(data), ref.key)
    return _checked(Part.from_bytes(data, key=ref.key), ref)


def _in_store(store: Store, ref: ObjectRef) -> Part:
    """Verify an object piece by piece and open it as a part that reads ranges from the store."""
    info = store.find(ref.key)
    if info is None:
        missing = not_found(ref.key, store.url)
        missing.hint = LOST
        raise missing
    check_nbytes(ref.key, store.url, expected=ref.nbytes, actual=info.nbytes)
    read_at = partial(store.get_range, ref.key)
    starts = range(0, ref.nbytes, PIECE)
    pieces = (read_at(start, min(PIECE, ref.nbytes - start)) for start in starts)
    _check_digest(ref.key, ref.blake3, digest_of_pieces(pieces), ref.key)
    return _checked(Part(read_at, ref.nbytes, key=ref.key), ref)


def _read(store: Store, ref: ObjectRef) -> Buffer:
    try:
        return store.read(ref.key, nbytes=ref.nbytes, pin=ref.pin)
    except ObjectNotFoundError as exc:
        exc.hint = LOST
        raise


def _checked(part: Part, ref: ObjectRef) -> Part:
    """Return a part after a check of its directory's digest."""
    _check_digest(f"{ref.key}: directory", ref.directory, part.digest, ref.key)
    return part


def _check_digest(what: str, expected: str, actual: str, key: str) -> None:
    if actual != expected:
        raise DigestMismatchError(what, expected=expected, actual=actual, key=key)
