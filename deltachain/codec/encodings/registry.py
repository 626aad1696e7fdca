"""Registry of encodings by name: built-in ones, and those of installed packages."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from deltachain.codec.encodings.base import Encoding
from deltachain.codec.encodings.dense import DenseEncoding
from deltachain.codec.encodings.max import MaxEncoding
from deltachain.codec.encodings.overwrite import OverwriteEncoding
from deltachain.codec.encodings.plain import PlainEncoding
from deltachain.codec.encodings.raw import RawEncoding
from deltachain.codec.encodings.step import StepEncoding
from deltachain.errors import ConfigError, UnsupportedFormatError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

logger = logging.getLogger(__name__)

GROUP: Final = "deltachain.encodings"
"""Entry point group of encodings; each object is an :class:`Encoding` instance."""

_OTHERS_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]*(\.[a-z0-9][a-z0-9_-]*)+")
_SHOWN: Final = 80
"""Largest number of characters of an unknown name in an error."""


class EncodingRegistry(Set[str]):
    """Encodings by name; as a set, the names that this process can read and write.

    An unknown name is looked up once among the entry points of installed packages. Only the entry
    point of exactly that name is imported, so that a name in untrusted bytes cannot import anything
    not installed as that encoding.

    Args:
        encodings: Built-in encodings.
    """

    def __init__(self, encodings: Iterable[Encoding]) -> None:
        self._known = {encoding.name: encoding for encoding in encodings}
        self._failures: dict[str, str] = {}
        self._found: Mapping[str, tuple[EntryPoint, ...]] | None = None

    @override
    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._find(name) is not None

    @override
    def __iter__(self) -> Iterator[str]:
        names = dict.fromkeys((*self._known, *self._installed()))
        return (name for name in names if name not in self._failures)

    @override
    def __len__(self) -> int:
        return sum(1 for _ in self)

    def register(self, encoding: Encoding) -> None:
        """Register an encoding of another package in this process.

        Raises:
            ConfigError: The name is taken, or has no dot: such names are reserved for FORMAT.md.
        """
        name = encoding.name
        if len(name) > _SHOWN or not _OTHERS_NAME.fullmatch(name):
            raise ConfigError(
                f"encoding name {name!r}: expected lower-case words with dots between them",
                hint="begin with the package's name, as in acme.zigzag",
            )
        if self._known.setdefault(name, encoding) != encoding:
            raise ConfigError(f"encoding {name!r} is registered already")

    def get(self, name: str, *, key: str = "") -> Encoding:
        """Return the encoding of a name.

        Args:
            name: Name in a document or a part.
            key: Key of that object, for errors.

        Raises:
            UnsupportedFormatError: No installed package provides it, or it cannot be loaded.
        """
        found = self._find(name)
        if found is not None:
            return found
        where = f"{key}: " if key else ""
        failure = self._failures.get(name)
        if failure is not None:
            raise UnsupportedFormatError(f"{where}{failure}", key=key, hint="repair that package")
        raise UnsupportedFormatError(
            f"{where}unknown encoding {name[:_SHOWN]!r}",
            key=key,
            hint="install the package that provides this encoding, or upgrade deltachain",
        )

    def chosen(self, name: str) -> Encoding:
        """Return the encoding chosen by a user for changed elements.

        Raises:
            ConfigError: The encoding is unknown, or stores whole tensors.
        """
        found = self._find(name)
        if found is not None and found.sparse:
            return found
        others = (known for known in self if known in self._known and self._known[known].sparse)
        failure = self._failures.get(name)
        raise ConfigError(
            f"encoding={name!r}: {failure or f'expected one of {tuple(others)}'}",
            hint="other encodings come with packages; install the one that provides it",
        )

    def _find(self, name: str) -> Encoding | None:
        """Return the encoding of a name, imported if an installed package provides it."""
        found = self._known.get(name)
        if found is not None or name in self._failures:
            return found
        entry_points = self._installed().get(name)
        if entry_points is None:
            return None
        try:
            self.register(_load(name, entry_points))
        except Exception as exc:  # noqa: BLE001 - another package's import may raise anything
            packages = ", ".join(_package(entry_point) for entry_point in entry_points)
            why = f"{type(exc).__name__}: {exc.args[0] if exc.args else ''}"
            self._failures[name] = f"encoding {name!r} of {packages} does not load: {why}"
            logger.warning("%s", self._failures[name])
        return self._known.get(name)

    def _installed(self) -> Mapping[str, tuple[EntryPoint, ...]]:
        """Return entry points of installed packages by name, read once and not imported."""
        if self._found is None:
            from importlib.metadata import entry_points  # noqa: PLC0415 - 30 ms, seldom needed

            found: dict[str, tuple[EntryPoint, ...]] = {}
            for entry_point in entry_points(group=GROUP):
                found[entry_point.name] = (*found.get(entry_point.name, ()), entry_point)
            self._found = found
        return self._found


def _load(name: str, entry_points: tuple[EntryPoint, ...]) -> Encoding:
    if len(entry_points) > 1:
        raise ConfigError("several packages provide it")
    found = entry_points[0].load()
    if not isinstance(found, Encoding) or found.name != name:
        raise ConfigError(f"{entry_points[0].value} is not an Encoding of that name")
    return found


def _package(entry_point: EntryPoint) -> str:
    return f"{entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist else "?"


ENCODINGS: Final = EncodingRegistry(
    (
        StepEncoding(),
        OverwriteEncoding(),
        DenseEncoding(),
        RawEncoding(),
        PlainEncoding(),
        MaxEncoding(),
    )
)
"""All encodings that this process can read and write."""
