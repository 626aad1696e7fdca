"""Interface of an object store.

A store maps keys to immutable bytes. The chain relies on two guarantees only: an object is visible
whole or not at all, and of all callers of ``put_if_absent`` for one key exactly one succeeds.
Guarantees that a store cannot give are declared in its ``Capabilities``, never approximated.
"""

import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final, Protocol, TypeAlias, TypeVar
from urllib.parse import SplitResult, urlsplit

from typing_extensions import override

from deltachain import errors
from deltachain.types import Buffer

_S = TypeVar("_S", bound=type)

_READS: Final = ("get", "read", "get_range", "find", "find_all", "list")
_WRITES: Final = ("put", "upload", "reveal", "put_if_absent", "delete")
_HINT: Final = (
    "the library of this store or what answered it is at fault; if it happens again, report it "
    "with the traceback"
)


def guarded(store: _S) -> _S:
    """Decorate a store class: what it does not convert itself becomes a ``StoreUnavailableError``.

    Endless recursion in a library, a response that crashes its parser, no thread left. A failed
    assertion is a bug and passes through.
    """
    for name in (*_READS, *_WRITES):
        setattr(store, name, _guarded_call(getattr(store, name)))
    return store


def _guarded_call(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def guarding(store: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        key = args[0] if args else ""
        with _errors_named(store, key):
            found = call(store, *args, **kwargs)
            return _guarded_rows(store, key, found) if isinstance(found, Iterator) else found

    return guarding


def _guarded_rows(store: Any, key: object, rows: Iterator[Any]) -> Iterator[Any]:  # noqa: ANN401
    with _errors_named(store, key):
        yield from rows


@contextmanager
def _errors_named(store: Any, key: object) -> Iterator[None]:  # noqa: ANN401
    try:
        yield
    except (errors.DeltaChainError, AssertionError):
        raise
    except Exception as exc:
        named = key if isinstance(key, str) else ""
        raise unavailable(named, store.url, f"unexpected {type(exc).__name__}", _HINT) from exc


MAX_KEY_LENGTH: Final = 512
"""Longest key, in characters: leaves room for a bucket prefix within the 1,024 bytes of S3."""

MAX_SEGMENT_LENGTH: Final = 255  # of file systems for one name, in characters
MAX_DOCUMENT: Final = 64 << 20  # bytes: fits a table of half a million tensors

_SEGMENT: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Guarantees of a store beyond atomic writes, which every store has."""

    conditional_put: bool
    """Whether ``put_if_absent`` is decided by the store: exactly one concurrent caller succeeds.

    Without it, ``put_if_absent`` checks first and then writes. Two concurrent callers may both
    return, so a chain there has a single publisher by configuration, which reads its manifest back
    after writing it.
    """

    list_consistent: bool
    """Whether ``list`` shows every object whose ``put`` returned before it began, and no object
    deleted before.

    Without it, a listing may be out of date: a key missing from it proves nothing.
    """

    probes: int = 1
    """Number of keys that one request of ``find_all`` looks up."""

    poll_s: float = 1.0
    """Seconds between two polls of one reader: short, and acceptable to the store."""

    cheap_ranges: bool = False
    """Whether ``get_range`` costs little more than its bytes, so that a reader may read a large
    object range by range, and again, instead of holding it in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """Metadata of one object, available without reading it."""

    key: str
    """Key of the object."""

    nbytes: int
    """Size of the object, in bytes."""

    modified: float | None
    """Time of the write, in Unix seconds by the store's clock; None if unknown."""

    pin: str = ""
    """Identifier that the store gives this content, for reading exactly that content; empty if the
    store has none."""


class Store(Protocol):
    """Named immutable objects in one location.

    All methods may be called from any thread at any time. Every method that takes a key raises
    ``ConfigError`` for a key that ``check_key`` refuses, ``StorePermissionError`` if the store
    denies access, and ``StoreUnavailableError`` if the store did not answer or cannot serve the
    request now. After a ``StoreUnavailableError`` from a write the outcome is unknown: the object
    exists whole or not at all, and only a read can tell.

    No key may be a folder of another key (``a`` and ``a/b``): file systems cannot hold both.
    """

    @property
    def url(self) -> str:
        """URL of the store, as ``open_store`` takes it; never contains credentials."""

    @property
    def capabilities(self) -> Capabilities:
        """Guarantees of the store beyond atomic writes."""

    @property
    def requests(self) -> int:
        """Number of network requests so far, as the store's provider counts them; 0 without one."""

    @property
    def unanswered_since(self) -> float | None:
        """Start of the first request without an answer since the last one with an answer.

        By ``time.monotonic()``; ``None`` while requests are answered, be it with an error, and of
        stores that do not tell.
        """
        return None

    def get(self, key: str, *, limit: int = MAX_DOCUMENT) -> bytes:
        """Read a whole small object of unknown size, as written by a single ``put``.

        A ``get`` that begins after a ``put`` returned sees that object or a later one.

        Raises:
            ObjectNotFoundError: No object has this key.
            MalformedError: The object exceeds ``limit`` bytes; no memory was allocated for it.
        """

    def read(self, key: str, *, nbytes: int, pin: str = "") -> Buffer:
        """Read a whole object of known size, however large, as fast as the store allows.

        Args:
            key: Key of the object.
            nbytes: Size of the object, in bytes.
            pin: Content identifier returned by ``put`` or ``find``: a store with such
                identifiers reads exactly that content, even if the key has other content by now.

        Raises:
            ObjectNotFoundError: No object has this key.
            MalformedError: The object has another size; no memory was allocated for it.
            ConfigError: ``nbytes`` is negative.
        """

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Read exactly ``length`` bytes of an object from byte ``start`` on, never fewer.

        An empty range inside the object or at its end is allowed.

        Raises:
            ObjectNotFoundError: No object has this key.
            MalformedError: The object ends before the range does. Objects are written whole, so
                an object shorter than its manifest says is not the object that was published.
            ConfigError: ``start`` or ``length`` is negative.
        """

    def put(self, key: str, data: Buffer) -> str:
        """Write an object; replace an existing one with the same key.

        Atomic: readers see the old object or the new one, whole. Durable on return. Idempotent. Of
        two concurrent calls the later one wins. ``data`` is not used after the call returns.

        Returns:
            Content identifier, the ``pin`` for ``read``; empty if the store has none.
        """

    def upload(self, key: str, data: Buffer) -> str:
        """Write the content of an object that ``reveal`` makes visible, as one of many.

        Whether the key has the object before ``reveal`` is left to the store: by default it has,
        and ``reveal`` does nothing. Otherwise as ``put``, with the same return value.
        """
        return self.put(key, data)

    def reveal(self, uploads: Mapping[str, str]) -> None:  # noqa: ARG002 - see upload
        """Make uploaded content visible, in as few requests as possible. Idempotent.

        Any process may link what another one uploaded. Each object is visible whole or not at all,
        and durable on return.

        Args:
            uploads: What ``upload`` returned, by key.
        """
        return

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Write an object if the key has none: atomic and durable as ``put``.

        With ``capabilities.conditional_put``, exactly one of all concurrent callers returns. Not
        idempotent: a caller whose own earlier attempt may have succeeded must read and compare the
        object before it concludes that another caller won.

        Raises:
            AlreadyExistsError: The key has an object, which was left unchanged.
        """

    def find(self, key: str) -> ObjectInfo | None:
        """Look up an object without reading it; return None if no object has this key."""

    def find_all(self, keys: Iterable[str]) -> Mapping[str, ObjectInfo]:
        """Look up several objects in as few requests as possible; return existing ones by key."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Iterate over all objects whose key begins with ``prefix``, in ascending order of keys.

        The prefix counts characters and may end inside a name: ``del`` finds ``deltas/1``.
        Objects written or deleted during the listing may or may not be included.

        Raises:
            ConfigError: No key can begin with ``prefix``; raised by the call, before iteration.
        """

    def delete(self, key: str) -> None:
        """Delete an object; do nothing if no object has this key."""

    def clock(self) -> float | None:
        """Return the time by the store's clock, in Unix seconds, without a request.

        It is the clock that ``ObjectInfo.modified`` is of, to about a second, as far as the last
        answer of the store told it. ``None`` before the first answer, and if the store tells none.
        """
        return None

    def close(self) -> None:
        """Close connections. Closing twice is allowed; other calls afterwards are not."""


def split_url(url: str, options: Mapping[str, Any]) -> SplitResult:
    parts = urlsplit(url)
    if options:
        names = ", ".join(sorted(options))
        raise errors.ConfigError(f"{parts.scheme}:// stores take no options: {names}")
    if parts.query or parts.fragment:
        raise errors.ConfigError(
            f"{parts.scheme}:// store URLs have no query and no fragment",
            hint="write ? as %3F and # as %23 in a URL, or give a plain path",
        )
    return parts


def is_segment(name: str) -> bool:
    return len(name) <= MAX_SEGMENT_LENGTH and _SEGMENT.fullmatch(name) is not None


def check_key(key: str) -> str:
    """Return ``key`` if it is valid in every store.

    A key is one or more segments separated by ``/``. A segment consists of ASCII letters, digits,
    ``.``, ``_`` and ``-`` and does not begin with a dot: this excludes ``.`` and ``..``, and
    reserves such names for temporary files of a store.

    Raises:
        ConfigError: The key is invalid or too long.
    """
    if len(key) > MAX_KEY_LENGTH:
        raise errors.ConfigError(
            f"key {key[:40]!r}... has {len(key)} characters, more than {MAX_KEY_LENGTH}"
        )
    for segment in key.split("/"):
        if not is_segment(segment):
            raise errors.ConfigError(
                f"key {key!r}: {segment!r} is not a name of 1 to {MAX_SEGMENT_LENGTH} characters "
                "from A-Z a-z 0-9 . _ - that does not begin with a dot"
            )
    return key


def check_prefix(prefix: str) -> str:
    """Return ``prefix`` if a valid key can begin with it."""
    # An empty prefix, or one that ends in a slash, needs one more character to be a key.
    check_key(f"{prefix}x" if not prefix or prefix.endswith("/") else prefix)
    return prefix


def check_range(start: int, length: int) -> None:
    if start < 0 or length < 0:
        raise errors.ConfigError(
            f"range of {length} bytes from byte {start}: neither may be negative"
        )


def find_each(store: Store, keys: Iterable[str]) -> Mapping[str, ObjectInfo]:
    found = {key: store.find(key) for key in keys}
    return {key: info for key, info in found.items() if info is not None}


def check_nbytes(key: str, url: str, *, expected: int, actual: int) -> None:
    if actual != expected:
        raise errors.MalformedError(
            f"object {key!r} in {url}: expected {expected} bytes, found {actual}", key=key
        )


def check_limit(key: str, url: str, *, nbytes: int, limit: int) -> None:
    if nbytes > limit:
        raise errors.MalformedError(
            f"object {key!r} in {url}: expected at most {limit} bytes, found {nbytes}", key=key
        )


def bytes_view(data: Buffer) -> memoryview:
    """Return a flat view of the bytes of ``data`` in memory order; copy only if not contiguous."""
    view = memoryview(data)
    if view.nbytes == 0:
        return memoryview(b"")  # memoryview.cast refuses shapes that contain a zero
    return view.cast("B") if view.c_contiguous else memoryview(view.tobytes())


def not_found(key: str, url: str) -> errors.ObjectNotFoundError:
    return errors.ObjectNotFoundError(f"{url} has no object {key!r}", key=key, url=url)


def unavailable(key: str, url: str, why: str, hint: str = "") -> errors.StoreUnavailableError:
    about = f"object {key!r} in {url}" if key else url
    return errors.StoreUnavailableError(f"{about}: {why}", key=key, url=url, hint=hint)


def already_exists(key: str, url: str) -> errors.AlreadyExistsError:
    return errors.AlreadyExistsError(f"{url} already has an object {key!r}", key=key, url=url)


def too_short(key: str, url: str, *, nbytes: int, end: int) -> errors.MalformedError:
    return errors.MalformedError(
        f"object {key!r} in {url}: expected at least {end} bytes, found {nbytes}", key=key
    )


Choose: TypeAlias = Callable[[int], tuple[int, int]]  # from size to start and length


class SimpleStore(Store):
    """A store that reads a range of an object by ``_read``, and looks up objects one by one."""

    @abstractmethod
    def _read(self, key: str, choose: Choose) -> bytes:
        """Read a range of an object."""

    @property
    def requests(self) -> int:
        return 0

    def get(self, key: str, *, limit: int = MAX_DOCUMENT) -> bytes:
        def whole(nbytes: int) -> tuple[int, int]:
            check_limit(key, self.url, nbytes=nbytes, limit=limit)
            return 0, nbytes

        return self._read(check_key(key), whole)

    @override
    def read(self, key: str, *, nbytes: int, pin: str = "") -> Buffer:
        check_range(0, nbytes)

        def whole(actual: int) -> tuple[int, int]:
            check_nbytes(key, self.url, expected=nbytes, actual=actual)
            return 0, nbytes

        return self._read(check_key(key), whole)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)

        def some(nbytes: int) -> tuple[int, int]:
            if start + length > nbytes:
                raise too_short(key, self.url, nbytes=nbytes, end=start + length)
            return start, length

        return self._read(check_key(key), some)

    def find_all(self, keys: Iterable[str]) -> Mapping[str, ObjectInfo]:
        return find_each(self, keys)

    def close(self) -> None:
        """Do nothing: no connection stays open between calls."""
