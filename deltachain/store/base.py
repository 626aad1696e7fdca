"""Interface of an object store.

A store maps keys to immutable bytes. The chain is built on two promises alone: an object is visible
whole or not at all, and of all callers of ``put_if_absent`` for one key exactly one succeeds.
Everything a store cannot promise is named by its ``Capabilities``, never approximated in silence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol
from urllib.parse import SplitResult, urlsplit

from deltachain.errors import (
    AlreadyExistsError,
    ConfigError,
    MalformedError,
    ObjectNotFoundError,
)
from deltachain.types import Buffer

MAX_KEY_LENGTH: Final = 512
"""Characters of a whole key: room for a bucket prefix below the 1,024 bytes that S3 allows."""

MAX_SEGMENT_LENGTH: Final = 255
"""Characters between two slashes: what file systems allow for one name."""

MAX_DOCUMENT: Final = 64 << 20
"""Bytes of the largest object that is read without knowing its size: room for a table of half a
million tensors."""

_SEGMENT: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Guarantees of a store beyond atomic writes, which every store has."""

    conditional_put: bool
    """``put_if_absent`` is decided by the store: of any number of racing callers one succeeds.

    Without it ``put_if_absent`` looks first and then writes. Two racers may both return, so a chain
    there has a single publisher by configuration, which reads its manifest back after writing it.
    """

    list_consistent: bool
    """``list`` shows every object whose ``put`` returned before it began, and none deleted before.

    Without it a listing may lag: nothing may be concluded from a key that is missing in it.
    """

    probes: int = 1
    """How many keys one request of ``find_all`` looks up."""

    poll_s: float = 1.0
    """Seconds between two polls of one reader, short enough and bearable for the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """Size and time of one object, known without reading it."""

    key: str
    """Under which it lies."""

    nbytes: int
    """Its size."""

    modified: float | None
    """Time of its write, in Unix seconds by the store's clock; None if unknown."""

    pin: str = ""
    """The store's name of this content, to read exactly that; empty where it has none."""


class Store(Protocol):
    """Named immutable objects in one place.

    All methods may be called from any thread at any time. Every one that takes a key raises
    ``ConfigError`` for a key that ``check_key`` refuses, ``StorePermissionError`` where the store
    refuses the caller, and ``StoreUnavailableError`` where the store did not answer or could not
    do it now. After the latter from a write the outcome is unknown: the object is there whole, or
    it is not there, and only reading it tells.

    No key may continue another one as a folder (``a`` and ``a/b``): file systems cannot hold both.
    """

    @property
    def url(self) -> str:
        """Where the objects are, as ``open_store`` takes it; never with credentials in it."""

    @property
    def capabilities(self) -> Capabilities:
        """Guarantees beyond atomic writes."""

    @property
    def requests(self) -> int:
        """Requests sent over a network so far, as the store's owner counts them; 0 without one."""

    def get(self, key: str, *, limit: int = MAX_DOCUMENT) -> bytes:
        """Read a whole small object of unknown size, as one ``put`` wrote it.

        Every ``get`` that begins after a ``put`` returned sees that object or a later one.

        Raises:
            ObjectNotFoundError: No object has this key.
            MalformedError: It has more than ``limit`` bytes; no memory was allocated for them.
        """

    def read(self, key: str, *, nbytes: int, pin: str = "") -> Buffer:
        """Read a whole object whose size is known, however large, as fast as the store can.

        Args:
            key: The object.
            nbytes: Its size, in bytes.
            pin: The name that ``put`` or ``find`` gave its content: a store that has such names
                reads exactly that content, whatever the key has by now.

        Raises:
            ObjectNotFoundError: No object has this key.
            MalformedError: It has another size; no memory was allocated for it.
            ConfigError: ``nbytes`` is negative.
        """

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Read ``length`` bytes of an object, from byte ``start`` on: exactly as many, never less.

        An empty range inside the object or at its end is allowed.

        Raises:
            ObjectNotFoundError: No object has this key.
            MalformedError: The object ends before the range does. Objects are written whole, so
                one that is shorter than the manifest that names it is not the object it names.
            ConfigError: ``start`` or ``length`` is negative.
        """

    def put(self, key: str, data: Buffer) -> str:
        """Write an object, in place of any other under this key.

        Atomic: readers see the old object or the new one, whole. Durable once it returned.
        Idempotent. Of two racing calls the later one wins. ``data`` is read before it returns and
        not kept.

        Returns:
            The store's name of this content, a ``pin`` for ``read``; empty where it has none.
        """

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Write an object under a key that has none: atomic and durable as ``put``.

        With ``capabilities.conditional_put``, of all racing callers exactly one returns. Not
        idempotent: a caller whose own earlier attempt may have succeeded must read the object and
        compare before it believes to have lost.

        Raises:
            AlreadyExistsError: The key has an object; it was not touched.
        """

    def find(self, key: str) -> ObjectInfo | None:
        """Look an object up without reading it; None where no object has this key."""

    def find_all(self, keys: Iterable[str]) -> Mapping[str, ObjectInfo]:
        """Look several objects up in as few requests as the store can; those that exist, by key."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object whose key begins with ``prefix``, in ascending order of keys.

        The prefix is a prefix of characters and may end inside a name: ``del`` finds ``deltas/1``.
        Objects written or deleted meanwhile may or may not be in it.

        Raises:
            ConfigError: No key can begin with ``prefix``; raised by the call, before iterating.
        """

    def delete(self, key: str) -> None:
        """Remove an object; nothing happens where no object has this key."""

    def close(self) -> None:
        """Close connections. Closing twice is allowed, other calls afterwards are not."""


def split_url(url: str, options: Mapping[str, Any]) -> SplitResult:
    """Split the URL of a store that takes no options, no query and no fragment.

    Raises:
        ConfigError: There are some. Only the scheme is shown: the rest may hold credentials.
    """
    parts = urlsplit(url)
    if options:
        names = ", ".join(sorted(options))
        raise ConfigError(f"{parts.scheme}:// stores take no options: {names}")
    if parts.query or parts.fragment:
        raise ConfigError(
            f"{parts.scheme}:// store URLs have no query and no fragment",
            hint="write ? as %3F and # as %23 in a URL, or give a plain path",
        )
    return parts


def is_segment(name: str) -> bool:
    """Whether ``name`` may stand between two slashes of a key."""
    return len(name) <= MAX_SEGMENT_LENGTH and _SEGMENT.fullmatch(name) is not None


def check_key(key: str) -> str:
    """Return ``key`` if every store can hold it under exactly this name.

    A key is one or more segments with ``/`` between them. A segment is made of ASCII letters,
    digits, ``.``, ``_`` and ``-`` and does not begin with a dot: that excludes ``.`` and ``..``,
    and leaves such names to the temporary files of a store.

    Raises:
        ConfigError: It is anything else, or too long.
    """
    if len(key) > MAX_KEY_LENGTH:
        raise ConfigError(
            f"key {key[:40]!r}... has {len(key)} characters, more than {MAX_KEY_LENGTH}"
        )
    for segment in key.split("/"):
        if not is_segment(segment):
            raise ConfigError(
                f"key {key!r}: {segment!r} is not a name of 1 to {MAX_SEGMENT_LENGTH} characters "
                "from A-Z a-z 0-9 . _ - that does not begin with a dot"
            )
    return key


def check_prefix(prefix: str) -> str:
    """Return ``prefix`` if some key begins with it.

    Raises:
        ConfigError: No key that ``check_key`` accepts begins with it.
    """
    # A prefix that ends in a slash, or is empty, needs one more character to be a key.
    check_key(f"{prefix}x" if not prefix or prefix.endswith("/") else prefix)
    return prefix


def check_range(start: int, length: int) -> None:
    """Refuse a range that no object can have.

    Raises:
        ConfigError: ``start`` or ``length`` is negative.
    """
    if start < 0 or length < 0:
        raise ConfigError(f"range of {length} bytes from byte {start}: neither may be negative")


def find_each(store: Store, keys: Iterable[str]) -> Mapping[str, ObjectInfo]:
    """``find_all`` of a store that looks up one key at a time."""
    found = {key: store.find(key) for key in keys}
    return {key: info for key, info in found.items() if info is not None}


def check_nbytes(key: str, url: str, *, expected: int, actual: int) -> None:
    """Refuse an object that has another size than it must have.

    Raises:
        MalformedError: It does.
    """
    if actual != expected:
        raise MalformedError(
            f"object {key!r} in {url}: expected {expected} bytes, found {actual}", key=key
        )


def check_limit(key: str, url: str, *, nbytes: int, limit: int) -> None:
    """Refuse an object that is too large to be read without knowing its size.

    Raises:
        MalformedError: It is.
    """
    if nbytes > limit:
        raise MalformedError(
            f"object {key!r} in {url}: expected at most {limit} bytes, found {nbytes}", key=key
        )


def bytes_view(data: Buffer) -> memoryview:
    """Bytes of ``data`` in memory order, flat, without a copy where they lie contiguously."""
    view = memoryview(data)
    if view.nbytes == 0:
        return memoryview(b"")  # memoryview.cast refuses shapes with a zero in them
    return view.cast("B") if view.c_contiguous else memoryview(view.tobytes())


def not_found(key: str, url: str) -> ObjectNotFoundError:
    """Build the error for a key without an object."""
    return ObjectNotFoundError(f"{url} has no object {key!r}", key=key, url=url)


def already_exists(key: str, url: str) -> AlreadyExistsError:
    """Build the error for a key that was to be absent."""
    return AlreadyExistsError(f"{url} already has an object {key!r}", key=key, url=url)


def too_short(key: str, url: str, *, nbytes: int, end: int) -> MalformedError:
    """Build the error for a range that ends at byte ``end`` of an object of ``nbytes`` bytes."""
    return MalformedError(
        f"object {key!r} in {url}: expected at least {end} bytes, found {nbytes}", key=key
    )
