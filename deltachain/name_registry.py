"""Objects by name: built-in ones, and those of installed packages."""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from typing_extensions import override

from deltachain.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

logger = logging.getLogger(__name__)

SHOWN: Final = 80  # largest number of characters of a name, and of an unknown one in an error

_OTHERS_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]*(\.[a-z0-9][a-z0-9_-]*)+")


class WithName(Protocol):
    @property
    def name(self) -> str:
        """Its name."""


_T = TypeVar("_T", bound=WithName)


class NameRegistry(Set[str], Generic[_T]):
    """Objects of one kind by name; as a set, their names, but for those that cannot be imported.

    An unknown name is looked up once among the entry points of installed packages. Only the entry
    point of exactly that name is imported, so that a name in untrusted bytes cannot import anything
    not installed as such an object.
    """

    def __init__(self, group: str, kind: type[_T], example: str, built_in: Iterable[_T]) -> None:
        self._group, self._kind, self._example = group, kind, example
        self.known = {one.name: one for one in built_in}
        self._failures: dict[str, str] = {}
        self._found: Mapping[str, tuple[EntryPoint, ...]] | None = None

    @override
    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.find(name) is not None

    @override
    def __len__(self) -> int:
        return sum(1 for _ in self)

    @override
    def __iter__(self) -> Iterator[str]:
        """Yield all names; import nothing."""
        names = dict.fromkeys((*self.known, *self._installed()))
        return (name for name in names if name not in self._failures)

    def register(self, one: _T) -> None:
        """Register an object of another package in this process; its name must have a dot."""
        name, what = one.name, self._kind.__name__.lower()
        if len(name) > SHOWN or not _OTHERS_NAME.fullmatch(name):
            raise ConfigError(
                f"{what} name {name!r}: expected lower-case words with dots between them",
                hint=f"begin with the package's name, as in {self._example}",
            )
        if self.known.setdefault(name, one) != one:
            raise ConfigError(f"{what} {name!r} is registered already")

    def find(self, name: str) -> _T | None:
        found = self.known.get(name)
        if found is not None or name in self._failures:
            return found
        entry_points = self._installed().get(name)
        if entry_points is None:
            return None
        try:
            self.register(self._load(name, entry_points))
        except Exception as exc:  # noqa: BLE001 - another package's import may raise anything
            dists = [entry_point.dist for entry_point in entry_points]
            packages = ", ".join(f"{one.name} {one.version}" if one else "?" for one in dists)
            what = f"{self._kind.__name__.lower()} {name!r} of {packages}"
            why = f"{type(exc).__name__}: {exc.args[0] if exc.args else ''}"
            self._failures[name] = f"{what} does not load: {why}"
            logger.warning("%s", self._failures[name])
        return self.known.get(name)

    def failure(self, name: str) -> str | None:
        return self._failures.get(name)

    def _installed(self) -> "Mapping[str, tuple[EntryPoint, ...]]":
        if self._found is None:
            from importlib.metadata import entry_points  # noqa: PLC0415 - 30 ms, seldom needed

            found: dict[str, tuple[EntryPoint, ...]] = {}
            for entry_point in entry_points(group=self._group):
                found[entry_point.name] = (*found.get(entry_point.name, ()), entry_point)
            self._found = found
        return self._found

    def _load(self, name: str, entry_points: "tuple[EntryPoint, ...]") -> _T:
        if len(entry_points) > 1:
            raise ConfigError("several packages provide it")
        found = entry_points[0].load()
        if not isinstance(found, self._kind) or found.name != name:
            kind = self._kind.__name__
            article = "an" if kind[0] in "AEIOU" else "a"
            raise ConfigError(f"{entry_points[0].value} is not {article} {kind} of that name")
        return found
