"""What deltachain does with an engine, and the names of the engine that each takes.

Names are looked up in loaded modules, else in the engine's source: nothing of it is imported, so it
can be examined before it loads.
"""

import ast
import logging
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from inspect import signature
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TypeAlias

from deltachain.errors import EngineVersionError

logger = logging.getLogger(__name__)

Found: TypeAlias = tuple[str, ast.AST]
"""A module's dotted name, and the statement in it that binds a name."""

_SCOPES: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True, slots=True)
class Capability:
    """One use of an engine, and the names that it takes."""

    does: str  # what deltachain does by these names, such as "pauses generation"
    names: tuple[str, ...]  # "module:name.member"; with "(a,b)" after it, called with these
    without: str = ""  # what is lost if a name is missing; empty: the engine is refused
    needed_by: str = ""  # a use that is then refused: a pause mode, or SERVER


def names(text: str) -> tuple[str, ...]:
    """Return the names in a text: a word that ends with ``:`` or ``.`` begins those after it."""
    owner, found = "", list[str]()
    for word in text.split():
        if word.endswith((":", ".")):
            owner = word
        else:
            found.append(owner + word)
    return tuple(found)


SERVER: Final = "server"  # the use of an engine as a server, beside that in its user's process


@dataclass(frozen=True, slots=True)
class CapabilityTable:
    """All uses of an engine. Its version is a hint: missing names decide what is refused."""

    engine: str  # name of the engine; in lower case, the name of its package
    tested: tuple[str, ...]  # releases that were run, the newest last
    rows: tuple[Capability, ...]

    def lacks(self) -> Mapping[Capability, tuple[str, ...]]:
        """Return the capabilities that the installed engine lacks, and the missing names."""
        found = {row: tuple(n for n in row.names if not is_there(n)) for row in self.rows}
        _parsed.cache_clear()  # tens of megabytes
        return {row: names for row, names in found.items() if names}

    def check(self, installed: str, uses: Collection[str] = ()) -> None:
        """Refuse an installed version for the names that it lacks.

        Raises:
            EngineVersionError: Names are missing that these uses, or any, need.
        """
        for row, names in self.lacks().items():
            if row.needed_by in uses if row.needed_by else not row.without:
                lost = f": {row.without}" if row.without else ""
                others = [one for one in self.tested if one != installed]
                raise EngineVersionError(
                    f"{self.engine} {installed} has no {', '.join(names)}, by which deltachain "
                    f"{row.does}{lost}",
                    hint=f"install a release of it that was run: {', '.join(others)}",
                )

    def remarks(self, installed: str) -> Iterator[str]:
        """Yield a line if this version was not run, and one for each capability that is lost."""
        if not any(re.match(rf"{re.escape(one)}(?!\d)", installed) for one in self.tested):
            yield (
                f"{self.engine} {installed} was not run with this deltachain, "
                f"{', '.join(self.tested)} were: only missing names are refused"
            )
        for row, names in self.lacks().items():
            if row.without:
                yield f"{self.engine} {installed} has no {', '.join(names)}: {row.without}"

    def tell(self, installed: str) -> None:
        """Log the remarks as warnings."""
        for remark in self.remarks(installed):
            logger.warning("deltachain: %s", remark)


@cache
def is_there(name: str) -> bool:
    """Return whether an installed package binds a name, and takes these parameters and no others.

    Optional parameters may be added. Attributes that methods set on ``self`` count as members.
    """
    path, bracket, parameters = name.partition("(")
    module, _, members = path.partition(":")
    wanted = {one.strip() for one in parameters.rstrip(")").split(",")} - {""}
    try:
        if _is_loaded(module, members, wanted if bracket else None):
            return True
        found = _resolved(module, members.split(".") if members else [])
        return found is not None and (not bracket or _takes(found, wanted))
    except RecursionError:  # of modules or classes that look the name up in each other
        return False


def _is_loaded(module: str, members: str, wanted: set[str] | None) -> bool:
    """Return whether a loaded module has a name; if not, its source decides, in a second."""
    try:
        found: Any = attrgetter(members)(sys.modules[module]) if members else sys.modules[module]
        given = signature(found).parameters.values() if wanted is not None else ()
    except (KeyError, AttributeError, TypeError, ValueError):
        return False
    if any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in given):
        return False  # what a wrapper takes
    names = {one.name for one in given} - {"self", "cls"}
    needed = names.intersection(one.name for one in given if one.default is one.empty)
    return wanted is None or needed <= wanted <= names


@cache
def _source(module: str) -> Path | None:
    top, *rest = module.split(".")
    spec = find_spec(top)  # of a package, without importing it
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, *rest)
        for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
            if file.is_file():
                return file
    return None


@cache
def _parsed(module: str) -> ast.Module | None:
    file = _source(module)
    return ast.parse(file.read_bytes()) if file else None


def _resolved(module: str, members: list[str]) -> Found | None:
    tree = _parsed(module)
    found: Found | None = (module, tree) if tree else None
    for name in members:
        found = found and _member(*found, name)
    return found


def _member(module: str, scope: ast.AST, name: str) -> Found | None:
    """Return the definition of a name in a module or in a class or its bases, through imports."""
    for node in reversed(list(_statements(scope))):
        if isinstance(node, ast.ImportFrom):
            if found := _imported(module, node, name):
                return found
        elif name in _bound(node):
            return module, node
    if isinstance(scope, ast.ClassDef):
        for base in scope.bases:
            owner = _resolved(module, ast.unparse(base).partition("[")[0].split("."))
            if owner and (found := _member(*owner, name)):
                return found
        return next(((module, node) for node in ast.walk(scope) if _sets(node, name)), None)
    return None


def _statements(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements that run where a scope's own do, without those for type checkers."""
    body = ast.iter_child_nodes(scope)
    if isinstance(scope, ast.If) and ast.unparse(scope.test).endswith("TYPE_CHECKING"):
        body = iter(scope.orelse)
    for node in body:
        yield node
        if not isinstance(node, _SCOPES):
            yield from _statements(node)


def _bound(node: ast.AST) -> set[str]:
    if isinstance(node, _SCOPES):
        return {node.name}
    if isinstance(node, ast.Import):
        return {alias.asname or alias.name for alias in node.names}
    return {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else set()


def _sets(node: ast.AST, name: str) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and (ast.unparse(node.value), node.attr) == ("self", name)
    )


def _imported(module: str, node: ast.ImportFrom, name: str) -> Found | None:
    """Return the definition of a name that an import binds; its import, if it is of elsewhere."""
    called = {alias.asname or alias.name: alias.name for alias in node.names}
    if name not in called and "*" not in called:
        return None
    file = _source(module)
    above = node.level - bool(file and file.name == "__init__.py")
    start = module.split(".")[: -above or None] if node.level else []
    origin = ".".join([*start, *filter(None, [node.module])])
    own = called.get(name, name)
    found = None
    if origin.partition(".")[0] == module.partition(".")[0]:
        found = None if origin == module else _resolved(origin, [own])  # a package imports its own
        found = found or _resolved(f"{origin}.{own}", [])
    return found or ((module, node) if name in called else None)


def _takes(found: Found, wanted: set[str]) -> bool:
    module, node = found
    if isinstance(node, ast.ClassDef):
        made = _member(module, node, "__init__")
        if made is None:  # its fields are parameters
            return all(_member(module, node, name) for name in wanted)
        node = made[1]
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return True  # assigned: what it takes is not written here
    given, only = node.args.posonlyargs + node.args.args, node.args.kwonlyargs
    optional = given[len(given) - len(node.args.defaults) :]
    optional += [
        one for one, value in zip(only, node.args.kw_defaults, strict=True) if value is not None
    ]
    names = {one.arg for one in given + only}
    needed = names - {one.arg for one in optional} - {"self", "cls"}
    return needed <= wanted and (wanted <= names or node.args.kwarg is not None)
