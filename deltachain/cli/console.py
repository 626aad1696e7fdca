"""Console output: messages on stderr, results on stdout.

With ``--json`` a command writes one JSON object to stdout (``follow`` and ``agent``: one a line),
and everything else to stderr; an error is a JSON object there, on the last line.
"""

import io
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deltachain.errors import DeltaChainError

_BETWEEN: Final = 2  # spaces between two columns of a table
_FOLDED: Final = 12  # least width of a column that is folded, if its cells are longer
_PIPE_WIDTH: Final = 140  # of output that is not a terminal: no line is truncated in a file

_EIGHTHS: Final = " ▏▎▍▌▋▊▉"


def print_in_any_encoding() -> None:
    """Let stdout replace what its encoding lacks: a result is not lost for want of a tick."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # None if it is closed
        sys.stdout.reconfigure(errors="replace")


def out() -> Console:
    return _console(stderr=False)


def err() -> Console:
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_WIDTH
    return console


def write_json(document: Mapping[str, Any]) -> None:
    """Print a JSON object as one line on stdout, in ASCII: stdout may have any encoding."""
    sys.stdout.write(json.dumps(document, allow_nan=False) + "\n")
    sys.stdout.flush()


def show(report: dict[str, Any], draw: Callable[[dict[str, Any]], None], *, as_json: bool) -> None:
    (write_json if as_json else draw)(report)


def fields(thing: object, *names: str) -> dict[str, Any]:
    return {name: getattr(thing, name) for name in names}


def say(words: str, style: str = "") -> None:
    err().print(Text(clean(words), style), soft_wrap=True)


def done(words: str, state: str = "") -> None:
    """Print that something is done, and the begin of the state digest that it led to."""
    text = Text.assemble(("✓", "bold green"), f"  {clean(words)}")
    out().print(text.append(f"  {state[:8]}" if state else "", "dim"), soft_wrap=True)


def say_error(error: DeltaChainError, *, as_json: bool = False) -> None:
    row = {
        "type": type(error).__name__,
        "message": str(error.args[0]) if error.args else "",
        **fields(error, "hint", "page", "exit_code", "retryable"),
    }
    if as_json:
        sys.stderr.write(json.dumps({"error": row}) + "\n")
        return
    row["error"] = row["message"] or row["type"]
    lines = [(name, clean(row[name])) for name in ("error", "hint", "page") if row[name]]
    parts = [part for name, text in lines for part in ((f"{name:<7}", "bold red"), text, "\n")]
    err().print(Text.assemble(*parts[:-1], style="red"), soft_wrap=True)


def say_interrupted() -> None:
    say("interrupted: nothing was left half done", "dim")


def clean(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


Cells: TypeAlias = Sequence[str | Text]


def table(titles: Sequence[str], rows: Iterable[Cells], *give_way: str, width: int = 0) -> Table:
    """Create a table without borders that fits into a width, of which nothing is cut.

    Bars, the columns without a title, are left out first, then those of ``give_way``, in turn. If
    that is not enough, cells are folded into several lines.
    """
    width, lines = width or out().width, list(rows)
    columns = [(title, [line[at] for line in lines]) for at, title in enumerate(titles)]
    for title in ("", *give_way):
        if sum(map(_width, columns)) - _BETWEEN > width:
            columns = [column for column in columns if column[0].lstrip(">~") != title]
    fits = sum(map(_width, columns)) - _BETWEEN <= width
    grid = Table(box=None, pad_edge=False, padding=(0, _BETWEEN, 0, 0), header_style="dim")
    for title, _ in columns:
        is_folded = title.startswith("~") or not fits
        grid.add_column(
            title.lstrip(">~"),
            justify="right" if title.startswith(">") else "left",
            no_wrap=not is_folded,
            overflow="fold" if is_folded else "ellipsis",
        )
    for cells in zip(*(cells for _, cells in columns), strict=True):
        grid.add_row(*cells)
    return grid


def _width(column: tuple[str, Cells]) -> int:
    """Return the width of a column and the space behind it; at most ``_FOLDED`` if it folds."""
    title, cells = column
    width = max(cell_len(str(cell)) for cell in (title.lstrip(">~"), *cells))
    return _BETWEEN + (min(width, _FOLDED) if title.startswith("~") else width)


def facts(**rows: str) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        grid.add_row(name.replace("_", " "), clean(value))
    return grid


def bar(share: float, width: int = 24) -> Text:
    """Draw a horizontal bar of ``share`` in [0, 1] of ``width`` columns; visible if above 0."""
    eighths = min(round(share * width * 8), width * 8)
    eighths = max(eighths, 1) if share > 0 else 0
    whole, rest = divmod(eighths, 8)
    return Text("█" * whole + (_EIGHTHS[rest] if rest else ""), "cyan")


def nbytes(value: int) -> str:
    return f"{value} B" if value < 1000 else f"{_scaled(value)}B"


def count(value: int) -> str:
    return str(value) if value < 1000 else _scaled(value).strip()


def _scaled(value: float) -> str:
    for unit in ("", "k", "M", "G", "T", "P"):
        if value < 999.5 or unit == "P":
            break
        value /= 1000
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"


def plural(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def percent(share: float) -> str:
    """Format a fraction: ``1.12 %``; a value above 0 is never shown as 0."""
    if share in (0.0, 1.0):
        return f"{100 * share:.0f} %"
    return f"{100 * share:.2f} %" if share >= 1e-4 else "<0.01 %"


def moment(seconds: float) -> str:
    """Format a time of this machine's time zone: ``23 Nov 09:00``, ``23 Nov 2019``."""
    try:
        then = time.localtime(seconds)
        this_year = then.tm_year == time.localtime().tm_year
        return time.strftime("%d %b %H:%M" if this_year else "%d %b %Y", then)
    except (OverflowError, ValueError, OSError):  # the publisher's clock may be wrong
        return "?"


def bits_per_change(stored: int, nnz: int) -> float | None:
    return round(8 * stored / nnz, 3) if nnz else None


class _Words(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(f"{record.levelname.lower()}  {record.getMessage()}", "yellow")


def show_warnings() -> None:
    logger = logging.getLogger("deltachain")
    if not any(isinstance(handler, _Words) for handler in logger.handlers):
        logger.addHandler(_Words(logging.WARNING))
        logger.propagate = False
        for waits in ("kernels.compiling", "subscribe.follow_loop"):  # without a word else
            talkative = logging.getLogger(f"deltachain.{waits}")
            talkative.addHandler(_Words(logging.INFO))
            talkative.setLevel(logging.INFO)
            talkative.propagate = False


def ranges(versions: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for version in versions:
        if runs and runs[-1][-1] == version - 1:
            runs[-1][1:] = [version]
        else:
            runs.append([version])
    return ", ".join(" to ".join(map(str, run)) for run in runs)
