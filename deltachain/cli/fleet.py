"""``deltachain fleet``: query or control replicas in parallel."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import StrEnum
from functools import partial
from operator import methodcaller
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deltachain import environment
from deltachain.cli import console as c
from deltachain.cli.options import AsJson, BoardUrls, KeyFile, TokenFile, secret
from deltachain.cli.serving import end, stopping
from deltachain.errors import ConfigError, ControlPlaneError

if TYPE_CHECKING:
    from deltachain.control.comparison import ReplicaRow
    from deltachain.control.replica_client import ReplicaClient
    from deltachain.control.roster import ReplicaAnswer, Roster
    from deltachain.status import Health, HealthLimits, Status


# Others are red.
STYLES: Final[dict[Health, str]] = {
    "ready": "green",
    "pinned": "cyan",
    "behind": "yellow",
    "not ready": "yellow",
}

NARROW: Final = 60  # width below which a replica takes several lines, so that no number is cut off
WIDE: Final = 110  # width from which on there is room for times and software


def replica_table(rows: Sequence[ReplicaRow], waiting: int, width: int) -> RenderableType:
    """Draw all replicas; health, version and lag are whole at any width.

    The summary comes first: of what is higher than a terminal, rich leaves out the end.
    """
    drawn = _narrow(rows) if width < NARROW else _columns(rows, wide=width >= WIDE)
    return Group(Text(_summary(rows, waiting), "dim", overflow="fold"), drawn)


def _columns(rows: Sequence[ReplicaRow], *, wide: bool) -> RenderableType:
    more = (">head", ">store", ">age", "software") if wide else ()
    titles = ("health", ">version", ">lag", *more, "~replica")
    cells = ((*_cells(row)[: 7 if wide else 3], _named(row)) for row in rows)
    return c.table(titles, cells, width=sys.maxsize)  # replicas are folded by the console


def _cells(row: ReplicaRow) -> tuple[Text | str, ...]:
    health, lag, status = Text(row.health, _style(row)), _number(row.lag), row.status
    if status is None:
        return (health, "-", lag, "-", "-", "-", "-")
    ours = f"deltachain/{status.deltachain}" if status.deltachain else ""
    software = c.clean(" ".join(one for one in (status.engine, ours) if one))
    times = _ago(status.silence_s), _ago(status.age_s)
    return (health, _number(status.version), lag, _number(status.head), *times, software)


def _narrow(rows: Sequence[ReplicaRow]) -> RenderableType:
    table = Table.grid()
    table.add_column(overflow="fold")
    for row in rows:
        health, version, lag, *_ = _cells(row)
        table.add_row(Text.assemble(health, f"  version {version}  lag {lag}\n", _named(row)))
    return table


def _named(row: ReplicaRow) -> Text:
    text = Text(c.clean(row.engine))
    if row.written_s is not None:
        text.append(f"  presence, {_ago(row.written_s)} old", "dim")
    for why in (*row.why, *([row.hint] if row.hint else [])):
        text.append(f"\n  {c.clean(why)}", _style(row))
    return text


def _style(row: ReplicaRow) -> str:
    return STYLES.get(row.health, "red")


def _summary(rows: Sequence[ReplicaRow], waiting: int) -> str:
    counts = Counter(row.health for row in rows)
    told = [f"{count} {health}" for health, count in counts.items()]
    told += [f"{waiting} still to answer"] if waiting else []
    versions = [row.status.version for row in rows if row.status]
    newest = max((version for version in versions if version is not None), default=None)
    held = "" if newest is None else f"; newest version held: {newest}"
    return f"{c.plural(len(rows) + waiting, 'replica')}: {', '.join(told)}{held}\n"


_SHOWN: Final = (
    "version",
    "head",
    "manifest",
    "state",
    "staged",
    "ready",
    "reason",
    "trouble",
    "fault",
    "pinned",
    "chain",
    "looked_at",
    "applied_at",
    "committed_at",
    "silence_s",
    "age_s",
    "deltachain",
)


def replica_json(row: ReplicaRow) -> dict[str, Any]:
    fields: dict[str, Any] = {"engine": row.engine, "health": row.health, "why": list(row.why)}
    status = row.status
    if status is None:
        return fields | {"error": "; ".join(row.why), "hint": row.hint}
    return {
        **fields,
        **c.fields(status, *_SHOWN),
        "lag_versions": row.lag,
        "doubt": row.doubt,
        "software": status.engine,
        "written_s": row.written_s,
    }


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, size, most in (("s", 1, 100), ("min", 60, 6000), ("h", 3600, 172_800)):
        if seconds < most:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


ACTION_S: Final = 600.0  # seconds for which an action is waited for: a large update takes long


class Verb(StrEnum):
    STATUS = "status"
    STAGE = "stage"
    UPDATE = "update"
    ROLLBACK = "rollback"
    RELEASE = "release"
    PAUSE = "pause"
    RESUME = "resume"
    SCRUB = "scrub"


ACTIONS: Final = (
    "`status` shows how they stand; `stage` fetches a version while the old one is served; "
    "`update` swaps it in; `rollback` goes to an older version and stays there until `release`; "
    "`pause` and `resume` hold requests and take them again; `scrub` proves what is served."
)

VERSIONED = (Verb.STAGE, Verb.UPDATE, Verb.ROLLBACK)


def fleet(  # noqa: PLR0913 - one argument an option
    verb: Annotated[Verb, typer.Argument(help=ACTIONS, metavar="VERB")],
    engines: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ENGINE...]",
            help="Addresses of the replicas: http://HOST:PORT, dns://NAME:PORT for all that a name "
            "stands for, or the URL where they write their presence. Default: the inventory.",
        ),
    ] = None,
    *,
    inventory: Annotated[
        Path | None,
        typer.Option(
            "--inventory",
            "-i",
            metavar="FILE",
            help="File with one address a line. Default: DELTACHAIN_ENGINES, a list with commas or "
            "such a file.",
        ),
    ] = None,
    presence: BoardUrls = None,
    version: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Version to stage, update or roll back to. Default: the head; for rollback the "
            "previous one.",
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Repeat the status.")] = False,
    every: Annotated[
        float, typer.Option(min=0.1, metavar="S", help="Seconds between rounds of `--watch`.")
    ] = 2.0,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            metavar="S",
            help="Seconds until a replica counts as failed. Default: 5 for status, else 600.",
        ),
    ] = None,
    max_lag: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Versions behind, above which a replica is stale."),
    ] = None,
    max_silence: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="S",
            help="Seconds without an answer of its store (cut off) or a new presence (silent). "
            "Default: DELTACHAIN_MAX_SILENCE_S, or 60.",
        ),
    ] = None,
    token_file: TokenFile = None,
    key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Query or control replicas in parallel; the worst come first.

    The lag is behind the newest version that any replica has seen. Exits with 7 if one failed, is
    silent, poisoned, in doubt, cut off from its store, or stale.

    Example: `deltachain fleet status http://a:8000 http://b:30000`

    Example: `deltachain fleet status --inventory replicas.txt --watch`

    Example: `deltachain fleet status dns://policy.default.svc:8000 --max-lag 3`

    Example: `deltachain fleet status --presence s3://policies/run-1-replicas`

    Roll back to version 5: `deltachain fleet rollback --version 5 http://a:8000 http://b:30000`
    """
    from deltachain.control.roster import STATUS_S, Roster
    from deltachain.status import HealthLimits

    if version is not None and verb not in VERSIONED:
        raise ConfigError(f"{verb} does not take a version")
    if watch and verb is not Verb.STATUS:
        raise ConfigError(f"--watch repeats a question, and {verb} is none", hint="watch `status`")
    token, key = secret("TOKEN", token_file), secret("ENGINE_KEY", key_file)
    seconds = timeout or (STATUS_S if verb is Verb.STATUS else ACTION_S)
    if max_silence is None:
        max_silence = environment.read(os.environ).get("MAX_SILENCE_S", 60.0)
    limits = HealthLimits(lag=max_lag, silence_s=max_silence)
    entries, boards = _entries(engines or [], inventory, presence or []), presence or []
    with Roster(entries, boards=boards, token=token, key=key, timeout_s=seconds) as roster:
        if roster.boards and verb is not Verb.STATUS:
            raise ConfigError(
                f"{roster.boards[0]}: a presence is read, and takes no {verb}",
                hint="give addresses of replicas",
            )
        given = () if version is None else (version,)
        question = methodcaller(verb.value, *given)
        round_ = partial(_round, roster, question, limits, as_json=as_json)
        rows = _watch(round_, every, as_json=as_json) if watch else round_()
    if any(row.is_alarming for row in rows):
        raise typer.Exit(ControlPlaneError.exit_code)


def _entries(
    engines: Sequence[str], inventory: Path | None, presence: Sequence[str]
) -> Sequence[str]:
    """Return the addresses of the command line, a file, or without presences the environment."""
    from deltachain.control.roster import parse_inventory, read_inventory

    if engines and inventory is not None:
        raise ConfigError("addresses and --inventory exclude each other", hint="give one of them")
    if inventory is not None:
        return read_inventory(inventory)
    given: str = environment.read(os.environ).get("ENGINES", "")
    if engines or presence:
        return engines
    if not given:
        raise ConfigError(
            "no replica is given",
            hint="give addresses, --inventory FILE, --presence URL or the variable "
            "DELTACHAIN_ENGINES",
        )
    return parse_inventory(given)


def _round(
    roster: Roster,
    question: Callable[[ReplicaClient], Status],
    limits: HealthLimits,
    live: Live | None = None,
    *,
    as_json: bool,
) -> list[ReplicaRow]:
    from deltachain.control.comparison import compare

    answers: dict[str, ReplicaAnswer] = {}
    if as_json:
        answers.update(roster.ask(question))
        rows = compare(answers, limits)
        places = list(dict.fromkeys((*roster.engines, *answers)))  # as given, for scripts
        given = sorted(rows, key=lambda row: places.index(row.engine))
        c.write_json({"replicas": [replica_json(row) for row in given]})
        return rows
    with nullcontext(live) if live else _live() as shown:
        console = shown.console
        for url, answer in roster.ask(question):
            answers[url] = answer
            if live is None:  # while watching, the round before stays until this one is complete
                rest = max(0, len(roster.engines) - len(answers))
                shown.update(replica_table(compare(answers, limits), rest, console.width))
        rows = compare(answers, limits)
        shown.update(replica_table(rows, 0, console.width), refresh=True)
    return rows


@contextmanager
def _live() -> Iterator[Live]:
    out = c.out()
    with Live(
        console=out, refresh_per_second=8, redirect_stdout=False, redirect_stderr=False
    ) as live:
        yield live
    if not out.is_terminal:
        out.line()  # which rich ends on terminals alone


def _watch(
    round_: Callable[..., list[ReplicaRow]], every_s: float, *, as_json: bool
) -> list[ReplicaRow]:
    stop, rows = Event(), []
    with stopping(stop) as by, nullcontext() if as_json else _live() as live:
        while not stop.is_set():
            rows = round_(live)
            stop.wait(every_s)
    end(by)
    return rows
