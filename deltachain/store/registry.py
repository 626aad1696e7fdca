"""Stores by the scheme of their URL: those of deltachain, and those that other packages add.

A package adds a store by an entry point, which is looked up when a URL has a scheme that is not
known otherwise::

    [project.entry-points."deltachain.stores"]
    sqlite = "my_package:open_sqlite"

A program that has no package calls :func:`register`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, Protocol, cast

from deltachain.errors import ConfigError
from deltachain.store.base import Store

GROUP: Final = "deltachain.stores"
"""The entry point group. A name in it is a scheme, its object an :class:`Opener`."""

_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]+")


class Opener(Protocol):
    """Opens the store at a URL of one scheme."""

    def __call__(self, url: str, options: Mapping[str, Any], /, *, writer: bool) -> Store:
        """Open a store; send no request and write nothing.

        Args:
            url: The whole URL, as the user wrote it. It may hold credentials: do not show it.
            options: ``storage_options`` of the user; empty without any.
            writer: Whether a publisher opens it.

        Raises:
            ConfigError: The URL or an option is wrong, or an extra is not installed.
        """


@dataclass(frozen=True, slots=True)
class _BuiltIn:
    """An opener of deltachain, imported when a URL asks for it.

    Attributes:
        module: Holds the opener.
        name: The opener.
        library: What its import needs, and may be absent.
        extra: What installs that.
    """

    module: str
    name: str
    library: str = ""
    extra: str = ""

    def load(self, scheme: str) -> Opener:
        """Import the opener.

        Raises:
            ConfigError: The library is not installed.
        """
        try:
            module = import_module(f"deltachain.store.{self.module}")
        except ModuleNotFoundError as exc:
            if (exc.name or "").startswith("deltachain"):
                raise
            hint = f"pip install 'deltachain[{self.extra}]'"
            raise ConfigError(f"{scheme}:// stores need {self.library}", hint=hint) from exc
        return cast("Opener", getattr(module, self.name))


_BUILT_IN: Final[Mapping[str, _BuiltIn]] = {
    "dist": _BuiltIn("dist", "open_dist", "torch", "torch"),
    "file": _BuiltIn("file.store", "open_file_store"),
    "hf": _BuiltIn("hf.url", "open_hf"),
    "memory": _BuiltIn("memory", "open_memory"),
    "s3": _BuiltIn("s3.store", "open_s3", "boto3", "s3"),
}
_FSSPEC: Final = _BuiltIn("fs.store", "open_fsspec")

_registered: Final[dict[str, Opener]] = {}


def register(scheme: str, opener: Opener) -> None:
    """Add a store to those that URLs can name in this process.

    Args:
        scheme: What stands before ``://``, in lower case.
        opener: Opens a store at such a URL.

    Raises:
        ConfigError: This cannot be a scheme, or another opener has it.
    """
    if _SCHEME.fullmatch(scheme) is None:
        raise ConfigError(
            f"{scheme!r} cannot be the scheme of a store",
            hint="use two or more of a-z 0-9 + . -, a letter first",
        )
    if scheme in _BUILT_IN or _registered.setdefault(scheme, opener) is not opener:
        raise ConfigError(f"{scheme}:// already has a store")


def opener_of(scheme: str) -> Opener:
    """Find what opens the URLs of a scheme: the last resort is fsspec, which refuses others.

    Raises:
        ConfigError: A library is not installed, or what a package adds cannot be used.
    """
    if scheme in _BUILT_IN:
        return _BUILT_IN[scheme].load(scheme)
    if scheme not in _registered:
        added = _added(scheme)
        if added is None:
            return _FSSPEC.load(scheme)
        _registered[scheme] = added
    return _registered[scheme]


def schemes() -> frozenset[str]:
    """Return every scheme that has a store, but for those of fsspec."""
    return frozenset({*_BUILT_IN, *_registered, *(found.name for found in _entry_points())})


def _added(scheme: str) -> Opener | None:
    """Load what another package adds for a scheme, if one does.

    Raises:
        ConfigError: Several do, or it cannot be imported.
    """
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
    except Exception as exc:  # a module of others runs here
        raise ConfigError(
            f"the store of {scheme}:// cannot be loaded from {names[0]}: "
            f"{type(exc).__name__}: {exc}",
            hint="install what it needs, or report it to its authors",
        ) from exc


def _entry_points() -> Any:  # noqa: ANN401 - its class is importlib's own
    from importlib.metadata import entry_points  # noqa: PLC0415 - takes 20 ms, and is seldom asked

    return entry_points(group=GROUP)
