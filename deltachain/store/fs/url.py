"""Conversion of a URL to an fsspec file system and a path on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from deltachain.errors import ConfigError
from deltachain.redact import redacted_url
from deltachain.store.fs.errors import failures, store_error
from deltachain.store.fs.promises import PROMISES, UNKNOWN, WRAPPERS
from deltachain.store.registry import schemes


def locate(url: str, options: Mapping[str, Any] | None = None) -> tuple[Any, str, str]:
    """Create the file system of a URL.

    Args:
        url: URL, as fsspec takes it; percent-encoding is not decoded.
        options: The ``storage_options`` of fsspec.

    Returns:
        A new, unshared file system, the path, and the URL without credentials.

    Raises:
        ConfigError: The scheme is unknown, its package is not installed, or the URL or the options
            are invalid.
        StoreError: The storage could not be reached.
    """
    scheme = url.partition(":")[0].lower()
    fsspec = _fsspec(scheme)
    if scheme not in fsspec.available_protocols():
        raise ConfigError(
            f"store URLs that begin with {scheme}:// are not supported",
            hint=_known(fsspec.available_protocols()),
        )
    if scheme in WRAPPERS or "::" in url:
        raise ConfigError(
            f"{scheme}:// shows another file system, whose guarantees are lost on the way",
            hint="give the URL of the storage itself",
        )
    if not url[len(scheme) :].startswith("://") or "?" in url or "#" in url:
        raise ConfigError(
            f"{scheme}:// store URLs have two slashes, no query and no fragment",
            hint="give credentials in the environment or as options",
        )
    try:
        urlsplit(url)
        shown = redacted_url(url).rstrip("/")
    except ValueError as exc:
        raise ConfigError(f"{scheme}:// store URL whose host cannot be read") from exc
    try:
        filesystem, path = fsspec.core.url_to_fs(
            url, **{**(options or {}), "skip_instance_cache": True}
        )
    except ImportError as exc:
        raise ConfigError(
            f"{scheme}:// stores need a package that is not installed", hint=_install(scheme, exc)
        ) from exc
    except (TypeError, ValueError) as exc:
        raise ConfigError(
            f"{shown}: the file system does not take this URL with these options: "
            f"{', '.join(sorted(options or {})) or 'none'}"
        ) from exc
    except failures() as exc:
        raise store_error(exc, "", shown) from exc
    return filesystem, path, shown


def _fsspec(scheme: str) -> ModuleType:
    try:
        return import_module("fsspec")
    except ImportError as exc:
        raise ConfigError(
            f"store URLs that begin with {scheme}:// need fsspec, or are not supported",
            hint=f"pip install '{_extra(scheme)}'; without it, {_known(())}",
        ) from exc


def _known(protocols: Iterable[str]) -> str:
    names = {*schemes(), *protocols} - WRAPPERS
    return "give the path of a folder, or a URL that begins with one of: " + ", ".join(
        sorted(names)
    )


def _extra(scheme: str) -> str:
    """Return the extra that installs fsspec, and the scheme's library if an extra exists for it."""
    package = PROMISES.get(scheme, UNKNOWN).package
    return package if package.startswith("deltachain[") else "deltachain[fsspec]"


def _install(scheme: str, error: ImportError) -> str:
    package = PROMISES.get(scheme, UNKNOWN).package
    return f"pip install '{package}'" if package else str(error)
