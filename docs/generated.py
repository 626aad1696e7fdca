"""Blocks of documents that are made from the code: layers, errors, commands and metrics.

::

    python -m docs.generated        # writes those that differ

Each stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``.
"""

import ast
import inspect
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from textwrap import fill
from typing import Any, Final

from typer.main import get_command

from deltachain import errors
from deltachain.cli.app import PANELS, app
from deltachain.errors import DeltaChainError
from deltachain.metrics import COUNTERS, GAUGES

ROOT: Final = Path(__file__).resolve().parents[1]

SOURCE_ROOTS: Final = ("", "vllm_ext", "sglang_ext")
"""Folders that packages lie in."""

_BLOCK: Final = re.compile(
    r"(?P<begin>^<!-- generated: (?P<name>\w+) -->\n)(?P<body>.*?)(?P<end>^<!-- end -->$)",
    re.MULTILINE | re.DOTALL,
)
_WIDTH: Final = 100
_ROLE: Final = re.compile(r":\w+:`~?(?:[\w.]+\.)?(\w+)`")


def renewed(text: str) -> str:
    """A document with each of its blocks made again."""
    return _BLOCK.sub(lambda b: f"{b['begin']}\n{MAKERS[b['name']]()}\n\n{b['end']}", text)


def documents() -> Iterator[Path]:
    """The documents that have such blocks."""
    for path in (*sorted((ROOT / "docs").rglob("*.md")), ROOT / "deltachain" / "ARCHITECTURE.md"):
        if _BLOCK.search(path.read_text(encoding="utf-8")):
            yield path


def layers() -> str:
    """The layers of the import contract, top to bottom, with the purpose of each package."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    rows: list[str] = next(c["layers"] for c in contracts if c["type"] == "layers")
    modules = [[name.strip() for name in re.split(r"[|:]", row)] for row in rows]
    shown = {name: name.removeprefix("deltachain.") for row in modules for name in row}
    left = max(map(len, shown.values())) + 2
    layers = (
        "\n".join(
            fill(
                purpose(name),
                _WIDTH,
                initial_indent=f"{shown[name]:{left}}",
                subsequent_indent=" " * left,
            )
            if is_package(name)
            else shown[name]
            for name in row
        )
        for row in modules
    )
    return "\n\n".join(layers).join(("```text\n", "\n```"))


def is_package(module: str) -> bool:
    path = module.replace(".", "/")
    return any((ROOT / root / path / "__init__.py").exists() for root in SOURCE_ROOTS)


def purpose(package: str) -> str:
    """The first sentence of a package's docstring; it is read, not imported."""
    for root in SOURCE_ROOTS:
        file = ROOT / root / package.replace(".", "/") / "__init__.py"
        if file.exists():
            return _first(ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))))
    raise FileNotFoundError(package)


def exits() -> str:
    """Every error class by its exit code: its remedy, and its sentence if the name is not plain."""
    found: dict[int, list[type[DeltaChainError]]] = {}
    for kind in _family(DeltaChainError):
        found.setdefault(kind.exit_code, []).append(kind)
    actions = _actions()
    parts: list[str] = []
    for code, kinds in sorted(found.items()):
        parts += [f"## Exit code {code}: `{kinds[0].__name__}`"]
        hints = {kind: kind.default_hint or actions.get(kind.__name__) for kind in kinds}
        rows = [
            f"* `{kind.__name__}`: {'' if kind.default_hint else _first(kind.__doc__) + ' '}"
            f"*{hint[0].upper()}{hint[1:]}{' (retryable)' if kind.retryable else ''}.*"
            for kind, hint in hints.items()
            if hint
        ]
        parts += [] if hints[kinds[0]] else [_first(kinds[0].__doc__)]
        parts += ["\n".join(rows)] if rows else []
    return "\n\n".join(parts)


def commands() -> str:
    """What ``--help`` says of every command; options of several commands stand first, once."""
    known: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    names = [f.__name__.replace("_", "-") for panel in PANELS.values() for f in panel]
    rows = {name: [_option(p) for p in known[name].params if _is_shown(p)] for name in names}
    uses = Counter(row for found in rows.values() for row in found)
    shared = [row for row, count in uses.items() if count > 1]
    parts = ["## Options of several commands", "\n".join(map(_row, shared))]
    for panel, functions in PANELS.items():
        parts.append(f"## {panel}")
        for name in (function.__name__.replace("_", "-") for function in functions):
            parts += [f"### {name}", *_command(name, known[name], rows[name], shared)]
    return "\n\n".join(parts)


def _command(
    name: str,
    command: Any,  # noqa: ANN401 - typer's own
    options: list[tuple[str, str]],
    shared: Container[tuple[str, str]],
) -> Iterator[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    places = " ".join((p.metavar or p.name).strip("[]{}").upper() for p in arguments)
    if places != "URL":
        yield f"`deltachain {name} {places}".rstrip() + "`"
    text = inspect.cleandoc(command.help or "").replace("\n\n\n", "\n\n")
    about, *examples = text.split("\n\nExample: ")
    yield "\n\n".join((about, *examples[:1]))  # the help has all of them
    if own := [_row(option) for option in options if option not in shared]:
        yield "\n".join(own)
    others = [names.partition(",")[0] for names, help_ in options if (names, help_) in shared]
    if others:
        yield f"{'Also' if own else 'Options:'} {', '.join(others)}."


def _is_shown(param: Any) -> bool:  # noqa: ANN401 - typer's own
    return bool(param.param_type_name == "option" and param.help and param.name != "as_json")


def _option(option: Any) -> tuple[str, str]:  # noqa: ANN401 - typer's own
    names = sorted(option.opts, key=len, reverse=True)
    return ", ".join(f"`{name}`" for name in names), option.help


def _row(option: tuple[str, str]) -> str:
    return f"* {option[0]}: {option[1]}"


def _actions() -> dict[str, str]:
    """What the tree in the module's docstring says of each class."""
    pairs = re.findall(r"── (\w+).*-> (.*)", errors.__doc__ or "")
    return {name: action.strip() for name, action in pairs}


def _family(kind: type[DeltaChainError]) -> Iterator[type[DeltaChainError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from _family(child)


def _first(docstring: str | None) -> str:
    """The first paragraph, on one line, without roles of Sphinx and doubled backticks."""
    line = " ".join((docstring or "").strip().partition("\n\n")[0].split())
    return _ROLE.sub(r"`\1`", line).replace("``", "`")


def metrics() -> str:
    """Every metric and its meaning; counters end in ``_total``."""
    kinds = ((GAUGES, ""), (COUNTERS, "_total"))
    rows = {f"deltachain_{name}{end}": known[name] for known, end in kinds for name in known}
    left = max(map(len, rows)) + 2
    lines = "\n".join(f"{name:{left}}{about}" for name, about in rows.items())
    return lines.join(("```text\n", "\n```"))


MAKERS: Final[dict[str, Callable[[], str]]] = {
    "layers": layers,
    "exits": exits,
    "commands": commands,
    "metrics": metrics,
}


def main() -> None:
    """Write what differs."""
    for path in documents():
        text = path.read_text(encoding="utf-8")
        if (again := renewed(text)) != text:
            path.write_text(again, encoding="utf-8")


if __name__ == "__main__":
    main()
