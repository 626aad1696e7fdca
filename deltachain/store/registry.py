"""Registry of stores by URL scheme: those of deltachain, and those of other packages.

A package adds a store by an entry point, which is looked up when a URL has an otherwise unknown
scheme::

    [project.entry-points."deltachain.stores"]
    sqlite = "my_package:open_sqlite"

A program without a package calls :func:`register`.
"""

import re
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final, Protocol, cast

from deltachain.errors import ConfigError
from deltachain.store.base import Store

GROUP: Final = "deltachain.stores"  # group of entry points: scheme, and Opener

_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]+")


class Opener(Protocol):
    """Function that opens the store at a URL of one scheme."""

    def __call__(self, url: str, options: Mapping[str, Any], /, *, writer: bool) -> Store:
        """Open a store; send no request and write nothing.

        Args:
            url: The whole URL, as given by the user. It may contain credentials: do not show it.
            options: The user's ``storage_options``; may be empty.
            writer: Whether a publisher opens the store.

        Raises:
            ConfigError: The URL or an option is wrong, or an extra is not installed.
        """


_BUILT_IN: Final[Mapping[str, tuple[str, str]]] = {
    "file": ("file", "open_file_store"),
    "hf": ("hf.store", "open_hf"),
    "memory": ("memory", "open_memory"),
    "s3": ("s3.store", "open_s3"),
}

_FSSPEC: Final = ("fsspec_store", "open_fsspec")

_registered: Final[dict[str, Opener]] = {}


def register(scheme: str, opener: Opener) -> None:
    """Register a store for a URL scheme in this process.

    Args:
        scheme: Scheme of the URLs, in lower case, without ``://``.
        opener: Function that opens a store at such a URL.

    Raises:
        ConfigError: The scheme is invalid, or registered with another opener.
    """
    if _SCHEME.fullmatch(scheme) is None:
        raise ConfigError(
            f"{scheme!r} cannot be the scheme of a store",
            hint="use two or more of a-z 0-9 + . -, a letter first",
        )
    if scheme in _BUILT_IN or _registered.setdefault(scheme, opener) is not opener:
        raise ConfigError(f"{scheme}:// already has a store")


def opener_of(scheme: str) -> Opener:
    """Return the opener of a scheme; unknown schemes go to fsspec, which may refuse them."""
    if scheme in _BUILT_IN:
        return _built_in(*_BUILT_IN[scheme])
    if scheme not in _registered:
        added = _added(scheme)
        if added is None:
            return _built_in(*_FSSPEC)
        _registered[scheme] = added
    return _registered[scheme]


def schemes() -> frozenset[str]:
    return frozenset({*_BUILT_IN, *_registered, *(found.name for found in _entry_points())})


def _built_in(module: str, name: str) -> Opener:
    try:
        return cast("Opener", getattr(import_module(f"deltachain.store.{module}"), name))
    except ModuleNotFoundError as exc:
        if (exc.name or "").startswith("deltachain"):
            raise
        # All others import their libraries later.
        raise ConfigError("s3:// stores need boto3", hint="pip install 'deltachain[s3]'") from exc


def _added(scheme: str) -> Opener | None:
    found = [entry for entry in _entry_points() if entry.name == scheme]
    names = sorted({entry.value for entry in found})
    if not found:
        return None
    if len(names) > 1:
        raise ConfigError(
            f"several packages have a store for {scheme}://: {', '.join(names)}",
            hint="uninstall all but one of them",
        )
    try:
        return cast("Opener", found[0].load())
    except Exception as exc:  # runs code of another package
        raise ConfigError(
            f"the store of {scheme}:// cannot be loaded from {names[0]}: "
            f"{type(exc).__name__}: {exc}",
            hint="install what it needs, or report it to its authors",
        ) from exc


def _entry_points() -> Any:  # noqa: ANN401 - its class is importlib's own
    from importlib.metadata import entry_points  # noqa: PLC0415 - takes 20 ms, and is seldom asked

    return entry_points(group=GROUP)
