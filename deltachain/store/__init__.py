"""Places that keep the objects of a chain: one ``Store`` protocol, a URL scheme each."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import SplitResult, unquote, urlsplit

from deltachain.errors import ConfigError
from deltachain.store.base import Capabilities, ObjectInfo, Store, check_key
from deltachain.store.file.store import FileStore
from deltachain.store.hf.url import open_hf
from deltachain.store.memory import MemoryStore
from deltachain.types import Buffer

__all__ = [
    "Buffer",
    "Capabilities",
    "FileStore",
    "MemoryStore",
    "ObjectInfo",
    "Store",
    "check_key",
    "open_store",
]

# One slash is enough: pathlib turns s3://bucket into s3:/bucket, which must not become a folder.
_URL: Final = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/")
_KNOWN: Final = (
    "a folder, s3://bucket/prefix, hf://buckets/namespace/name/prefix, file:///folder, "
    "memory://name, dist://name, or a URL of fsspec such as gs:// and az://"
)


def open_store(
    url: str | os.PathLike[str],
    options: Mapping[str, Any] | None = None,
    *,
    writer: bool = False,
) -> Store:
    """Open the store at a URL, or in the folder of a path.

    ``memory://name`` is the store of that name in this process. ``file:///folder`` and plain paths
    are folders of a file system, made by the first write. ``s3://bucket/prefix`` is a bucket of
    whoever speaks S3; see ``deltachain.store.s3``. ``hf://buckets/namespace/name/prefix`` is a
    bucket of the Hugging Face Hub; see ``deltachain.store.hf``. ``dist://name`` is the memory
    of a job of ``torch.distributed``; see ``deltachain.store.dist``. Any other scheme is one of
    fsspec, which promises less; see ``deltachain.store.fs``.

    Args:
        url: Where.
        options: What the store's library needs to know beyond the URL and the environment.
        writer: Whether a publisher asks, who is given the larger share of what a store allows.

    Raises:
        ConfigError: The scheme is not supported, the URL has no place in it, or the store takes no
            such options.

    Example:
        >>> store = deltachain.open_store(new_url)
        >>> store.put_if_absent("notes/1.txt", b"first")
        >>> store.get("notes/1.txt")
        b'first'
        >>> store.close()
    """
    text = os.fspath(url)
    if not text or "\0" in text:
        raise ConfigError("a store needs a URL or a path", hint=f"give {_KNOWN}")
    match = _URL.match(text)
    if match is None:
        return FileStore(text)
    scheme = match["scheme"].lower()
    if scheme not in ("file", "memory"):
        return _open_remote(scheme, text, options, writer=writer)
    # Only the scheme is ever shown: what follows it may hold credentials.
    if options:
        raise ConfigError(f"{scheme}:// stores take no options: {', '.join(sorted(options))}")
    parts = urlsplit(text)
    if parts.query or parts.fragment:
        raise ConfigError(
            f"{scheme}:// store URLs have no query and no fragment",
            hint="write ? as %3F and # as %23 in a URL, or give a plain path",
        )
    return _open_file(parts) if scheme == "file" else _open_memory(parts)


def _open_remote(
    scheme: str, url: str, options: Mapping[str, Any] | None, *, writer: bool
) -> Store:
    """A store behind a library that is an extra, and is imported when it is asked for."""
    if scheme == "s3":
        return _open_s3(url, options)
    if scheme == "hf":
        return open_hf(url, options, writer=writer)
    if scheme == "dist":
        return _open_dist(url, options)
    from deltachain.store.fs.store import open_fsspec  # noqa: PLC0415

    return open_fsspec(url, options)


def _open_s3(url: str, options: Mapping[str, Any] | None) -> Store:
    try:
        from deltachain.store.s3.store import open_s3  # noqa: PLC0415
    except ModuleNotFoundError as exc:
        if (exc.name or "").startswith("deltachain"):
            raise
        hint = "pip install 'deltachain[s3]'"
        raise ConfigError("s3:// stores need boto3", hint=hint) from exc
    return open_s3(url, options)


def _open_dist(url: str, options: Mapping[str, Any] | None) -> Store:
    if options:
        raise ConfigError(f"dist:// stores take no options: {', '.join(sorted(options))}")
    try:
        from deltachain.store.dist import DistStore  # noqa: PLC0415
    except ModuleNotFoundError as exc:
        if (exc.name or "").startswith("deltachain"):
            raise
        hint = "pip install 'deltachain[torch]'"
        raise ConfigError("dist:// stores need torch", hint=hint) from exc
    return DistStore.named(url.partition("://")[2].rstrip("/"))


def _open_file(parts: SplitResult) -> FileStore:
    if parts.netloc not in ("", "localhost") or parts.path in ("", "/"):
        raise ConfigError(
            "file:// store URLs name a folder of this machine",
            hint="three slashes: file:///absolute/folder",
        )
    path = unquote(parts.path)
    if "\0" in path:
        raise ConfigError("file:// store URLs cannot hold a NUL")
    return FileStore(path)


def _open_memory(parts: SplitResult) -> MemoryStore:
    return MemoryStore.named(f"{parts.netloc}{parts.path}".rstrip("/"))
