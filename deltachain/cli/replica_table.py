"""Table of replicas, for terminals of any width."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from deltachain.cli import console as c

if TYPE_CHECKING:
    from deltachain.control.client.comparison import Health, ReplicaRow

STYLES: Final[dict[Health, str]] = {
    "ready": "green",
    "pinned": "cyan",
    "behind": "yellow",
    "not ready": "yellow",
}
"""Style of each health; of all others red."""

NARROW: Final = 60
"""Width below which a replica takes several lines, so that no number is cut off."""

WIDE: Final = 110
"""Width from which on there is room for times and software."""


def replica_table(
    rows: Sequence[ReplicaRow], waiting: int, width: int, height: int | None = None
) -> RenderableType:
    """Draw all replicas; health, version and lag are whole at any width.

    Args:
        rows: The replicas, worst first.
        waiting: Number of replicas that have not answered yet.
        width: Width of the terminal, in columns.
        height: Lines that there are: the last replicas are left out if they do not fit, and their
            summary is not. By default all are drawn.
    """
    lines = _narrow(rows) if width < NARROW else _columns(rows, wide=width >= WIDE)
    summary = Text(_summary(rows, waiting), "dim", overflow="fold")
    return Group(lines, summary) if height is None else _Fitted(lines, summary, height)


class _Fitted:
    """A table whose last lines give way to a summary below it.

    Args:
        table: The table.
        summary: What is always shown.
        height: Number of lines of both together.
    """

    def __init__(self, table: RenderableType, summary: RenderableType, height: int) -> None:
        self._table, self._summary, self._height = table, summary, height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        below = console.render_lines(self._summary, options, pad=False)
        lines = console.render_lines(self._table, options, pad=False)
        room = max(1, self._height - len(below))
        if len(lines) > room:
            lines = lines[: room - 1] + console.render_lines(Text("..."), options, pad=False)
        for line in (*lines, *below):
            yield from line
            yield Segment.line()


def _columns(rows: Sequence[ReplicaRow], *, wide: bool) -> RenderableType:
    titles = ("health", ">version", ">lag", *(_WIDE_TITLES if wide else ()), "~replica")
    table = c.table(*titles)
    for row in rows:
        numbers = (_number(_version(row)), _number(row.lag))
        table.add_row(_health(row), *numbers, *(_wide(row) if wide else ()), _named(row))
    return table


def _narrow(rows: Sequence[ReplicaRow]) -> RenderableType:
    table = Table.grid()
    table.add_column(overflow="fold")
    for row in rows:
        numbers = f"  version {_number(_version(row))}  lag {_number(row.lag)}"
        table.add_row(Text.assemble(_health(row), numbers, "\n", _named(row)))
    return table


_WIDE_TITLES: Final = (">head", ">store", ">age", "software")


def _wide(row: ReplicaRow) -> tuple[str, str, str, str]:
    found = row.status
    if found is None:
        return "-", "-", "-", "-"
    ours = f"deltachain/{found.deltachain}" if found.deltachain else ""
    software = " ".join(one for one in (found.engine, ours) if one)
    return _number(found.head), _ago(found.silence_s), _ago(found.age_s), c.clean(software)


def _named(row: ReplicaRow) -> Text:
    """Return address and reasons of a replica, one below the other."""
    text = Text(c.clean(row.engine))
    if row.written_s is not None:
        text.append(f"  presence, {_ago(row.written_s)} old", "dim")
    for why in (*row.why, *([row.hint] if row.hint else [])):
        text.append(f"\n  {c.clean(why)}", _style(row))
    return text


def _health(row: ReplicaRow) -> Text:
    return Text(row.health, _style(row))


def _style(row: ReplicaRow) -> str:
    return STYLES.get(row.health, "red")


def _version(row: ReplicaRow) -> int | None:
    return row.status.version if row.status else None


def _summary(rows: Sequence[ReplicaRow], waiting: int) -> str:
    counts = Counter(row.health for row in rows)
    told = [f"{count} {health}" for health, count in counts.items()]
    told += [f"{waiting} still to answer"] if waiting else []
    versions = [version for row in rows if (version := _version(row)) is not None]
    held = f"; newest version held: {max(versions)}" if versions else ""
    count = len(rows) + waiting
    return f"\n{count} replica{'' if count == 1 else 's'}: {', '.join(told)}{held}"


def replica_json(row: ReplicaRow) -> dict[str, Any]:
    """Return the fields of one replica for ``--json``."""
    found: dict[str, Any] = {"engine": row.engine, "health": row.health, "why": list(row.why)}
    status = row.status
    if status is None:
        return found | {"error": "; ".join(row.why), "hint": row.hint}
    return found | {
        "version": status.version,
        "lag_versions": row.lag,
        "head": status.head,
        "manifest": status.manifest,
        "state": status.state,
        "staged": status.staged,
        "ready": status.ready,
        "reason": status.reason,
        "trouble": status.trouble,
        "doubt": row.doubt,
        "fault": status.fault,
        "pinned": status.pinned,
        "chain": status.chain,
        "looked_at": status.looked_at,
        "applied_at": status.applied_at,
        "committed_at": status.committed_at,
        "silence_s": status.silence_s,
        "age_s": status.age_s,
        "software": status.engine,
        "deltachain": status.deltachain,
        "written_s": row.written_s,
    }


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _ago(seconds: float | None) -> str:
    """Format seconds: ``7 s``, ``12 min``, ``3 h``, ``2 d``."""
    if seconds is None:
        return "-"
    for unit, size, most in (("s", 1, 100), ("min", 60, 6000), ("h", 3600, 172_800)):
        if seconds < most:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"
