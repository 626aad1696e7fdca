"""Made-up packages as an installer leaves them, and engines with the names of a table alone."""

import importlib
from collections.abc import Collection
from pathlib import Path

from deltachain.replica import capabilities
from deltachain.replica.capabilities import CapabilityTable


def write_package(
    site: Path, name: str, *, version: str = "1.0", source: str | None = None, entries: str = ""
) -> None:
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entries)
    if source is not None:
        (site / f"{name}.py").write_text(source)


def write_engine(folder: Path, table: CapabilityTable, without: Collection[str] = ()) -> None:
    """Write the package of an engine into a folder for ``sys.path``."""
    modules: dict[str, dict[str, list[str]]] = {table.engine.lower(): {}}
    for name in (name for row in table.rows for name in row.names):
        path, bracket, parameters = name.partition("(")
        module, _, members = path.partition(":")
        top, _, member = members.partition(".")
        found = modules.setdefault(module, {})
        signature = f"({parameters.rstrip(')')})" if bracket else "(self)"
        if top and name not in without:
            found.setdefault(top, []).append(f"def {member or '__init__'}{signature}: ...")
    for module, names in modules.items():
        parts = module.split(".")
        for depth in range(len(parts)):
            package = folder.joinpath(*parts[: depth + 1])
            package.mkdir(parents=True, exist_ok=True)
            (package / "__init__.py").touch()
        lines = [f"class {top}:\n    " + "\n    ".join(body) + "\n" for top, body in names.items()]
        folder.joinpath(*parts, "__init__.py").write_text("\n".join(lines), encoding="utf-8")
    forget()


def forget() -> None:
    """Look names up anew: the installed packages changed."""
    importlib.invalidate_caches()
    for lookup in (capabilities.is_there, capabilities._source, capabilities._parsed):
        lookup.cache_clear()
