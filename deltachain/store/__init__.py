"""Object stores: one ``Store`` protocol, and a URL scheme for each."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

from deltachain.errors import ConfigError
from deltachain.redact import redacted_url
from deltachain.store.base import Capabilities, ObjectInfo, Store, check_key
from deltachain.store.file import FileStore
from deltachain.store.memory import MemoryStore
from deltachain.store.registry import Opener, opener_of, register, schemes
from deltachain.types import Buffer

__all__ = [
    "Buffer",
    "Capabilities",
    "FileStore",
    "MemoryStore",
    "ObjectInfo",
    "Opener",
    "Store",
    "check_key",
    "open_store",
    "register",
]

Location: TypeAlias = str | os.PathLike[str]  # URL of a store, or path of its folder

# One slash is enough: pathlib turns s3://bucket into s3:/bucket, which must not become a folder.
_URL: Final = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/")
_SCHEME_ALONE: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)(?://|[:;])")
_OF_FSSPEC: Final = frozenset({"abfs", "abfss", "az", "gcs", "gs", "http", "https"})
_KNOWN: Final = (
    "a folder, s3://bucket/prefix, hf://buckets/namespace/name/prefix, file:///folder, "
    "memory://name, or a URL of fsspec such as gs:// and az://"
)


def location_of(url: object) -> str:
    """Return a URL or the path of a folder as text; ``~`` in a path is the user's home."""
    text = os.fspath(url) if isinstance(url, str | os.PathLike) else ""
    if not text or "\0" in text:
        raise ConfigError("a store needs a URL or a path", hint=f"give {_KNOWN}")
    return os.path.expanduser(text)  # noqa: PTH111 - leaves URLs as they are


def open_store(
    url: Location, options: Mapping[str, Any] | None = None, *, writer: bool = False
) -> Store:
    """Open the store at a URL, or in the folder of a path.

    ``memory://name`` is the store of that name in this process. ``file:///folder`` and plain paths
    are folders of a file system, created by the first write; ``~`` is the user's home.
    ``s3://bucket/prefix`` is a bucket of any S3-compatible server; see ``deltachain.store.s3``.
    ``hf://buckets/namespace/name/prefix`` is a bucket of the Hugging Face Hub; see
    ``deltachain.store.hf``. Other packages add schemes; see ``deltachain.store.registry``. Any
    other scheme is passed to fsspec, which guarantees less; see ``deltachain.store.fsspec_store``.

    Args:
        url: The URL, or the path of a folder.
        options: Options of the store's library, beyond the URL and the environment.
        writer: Whether a publisher opens the store; it gets a larger share of a rate limit.

    Raises:
        ConfigError: The scheme is not supported, the URL names no location, or the store does not
            take these options.

    Examples:
        >>> store = deltachain.open_store(new_url)
        >>> store.put_if_absent("notes/1.txt", b"first")
        >>> store.get("notes/1.txt")
        b'first'
        >>> store.close()
    """
    text = location_of(url)
    match = _URL.match(text)
    if match is None:
        _refuse_nearly_url(text)
        return FileStore(text)
    return opener_of(match["scheme"].lower())(text, options or {}, writer=writer)


def _refuse_nearly_url(path: str) -> None:
    """Refuse a path that was meant as a URL: it would become a folder below the current one."""
    if "://" in path:
        raise ConfigError(
            "a store has '://' in its path, and does not begin as a URL",
            hint="a URL begins with its scheme: leave out what is before it, such as a quote",
        )
    start = _SCHEME_ALONE.match(path)
    if start is not None and start[1].lower() in _OF_FSSPEC | schemes():
        scheme = start[1].lower()
        raise ConfigError(
            f"a store begins with {start[0]!r}, which is neither a URL nor a usual path",
            hint=f"a URL begins with {scheme}://; for a folder of that name, write ./{start[0]}",
        )


_ANY_URL: Final = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/+(?P<rest>[^?#]*)", re.DOTALL)

_WHOLE: Final = {"hf": 3}  # rights to a Hub bucket hold for all of it


def check_apart(url: str, chain: str) -> None:
    """Check that whoever may write at one URL need not have the right to write to a chain."""
    here, there = _place(url), _place(chain)
    shorter = min(len(here), len(there))
    if here[:shorter] != there[:shorter]:
        return
    if here == there:
        relation = "is in the bucket of" if here[0] in _WHOLE else "is the URL of"
    else:
        relation = "is inside" if len(here) > len(there) else "contains"
    raise ConfigError(
        f"{redacted_url(url)} {relation} the chain {redacted_url(chain)}, which only its publisher "
        "may write to",
        hint="name a place beside the chain; on the Hub, a bucket of its own",
    )


def _place(url: str) -> tuple[str, ...]:
    match = _ANY_URL.match(url)
    scheme = match["scheme"].lower() if match else "file"
    if scheme == "file":
        path = unquote(f"/{match['rest']}") if match else url
        return scheme, *Path(path).resolve().parts[1:]
    rest = match["rest"] if match else ""
    parts = tuple(part for part in rest.split("/") if part not in ("", "."))
    if scheme in _WHOLE:  # whose names are the same in any case
        parts = tuple(part.lower() for part in parts[: _WHOLE[scheme]])
    return scheme, *parts
