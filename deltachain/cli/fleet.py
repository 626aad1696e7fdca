"""``deltachain fleet``: query or control replicas in parallel."""

# ruff: noqa: PLC0415 - dependencies are imported when the command runs
from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from deltachain.cli import console as c
from deltachain.cli.options import AsJson, KeyFile, TokenFile, secret
from deltachain.errors import ConfigError, ControlPlaneError
from deltachain.threads import Pool

if TYPE_CHECKING:
    from deltachain.control.client.replica import ReplicaClient
    from deltachain.replica.status import ReplicaStatus


class Verb(StrEnum):
    """Actions of replicas."""

    STATUS = "status"
    STAGE = "stage"
    UPDATE = "update"
    ROLLBACK = "rollback"
    RELEASE = "release"
    PAUSE = "pause"
    RESUME = "resume"
    SCRUB = "scrub"


VERSIONED = (Verb.STAGE, Verb.UPDATE, Verb.ROLLBACK)


def fleet(
    verb: Annotated[Verb, typer.Argument(help="The action.")],
    engines: Annotated[
        list[str], typer.Argument(metavar="ENGINE...", help="Addresses of the replicas.")
    ],
    *,
    version: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="For stage, update and rollback. Default: the head; of rollback the previous one.",
        ),
    ] = None,
    token_file: TokenFile = None,
    key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Query or control replicas in parallel.

    Exits with 7 if a replica fails.

    Example: `deltachain fleet status http://a:8000 http://b:30000`

    Roll back to version 5: `deltachain fleet rollback --version 5 http://a:8000 http://b:30000`
    """
    from deltachain.control.client.replica import ReplicaClient

    if version is not None and verb not in VERSIONED:
        raise ConfigError(f"{verb} does not take a version")
    token, key = secret("TOKEN", token_file), secret("ENGINE_KEY", key_file)
    with Pool(len(engines)) as pool:
        clients = [ReplicaClient(engine, token=token, key=key) for engine in engines]
        found = list(pool.map(lambda client: _ask(client, verb, version), clients))
    rows = compared([_row(client.url, one) for client, one in zip(clients, found, strict=True)])
    if as_json:
        c.write_json({"replicas": rows})
    else:
        _show(rows)
    if any(isinstance(one, ControlPlaneError) for one in found):
        raise typer.Exit(ControlPlaneError.exit_code)


def _ask(
    client: ReplicaClient, verb: Verb, version: int | None
) -> ReplicaStatus | ControlPlaneError:
    arguments = () if version is None else (version,)
    try:
        with client:
            answer: ReplicaStatus = getattr(client, verb.value)(*arguments)
            return answer
    except ControlPlaneError as exc:
        return exc


def _row(url: str, found: ReplicaStatus | ControlPlaneError) -> dict[str, Any]:
    if isinstance(found, ControlPlaneError):
        return {"engine": url, "error": str(found.args[0]), "hint": found.hint}
    return {
        "engine": url,
        "version": found.version,
        "manifest": found.manifest,
        "state": found.state,
        "head": found.head,
        "lag_versions": found.lag_versions,
        "staged": found.staged,
        "ready": found.ready,
        "reason": found.reason,
        "trouble": found.trouble,
        "doubt": found.doubt,
    }


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows, with a doubt for replicas of equal version but different manifests."""
    manifests: dict[int | None, set[str]] = {}
    for row in rows:
        if row.get("manifest"):
            manifests.setdefault(row["version"], set()).add(row["manifest"])
    return [
        row | {"doubt": row["doubt"] or f"others hold another version {row['version']}"}
        if len(manifests.get(row.get("version"), ())) > 1
        else row
        for row in rows
    ]


def _show(rows: list[dict[str, Any]]) -> None:
    table = c.table("engine", ">version", ">head", ">lag", "state", "how it is")
    for row in rows:
        numbers = [_number(row.get(name)) for name in ("version", "head", "lag_versions")]
        state = (row.get("state") or "")[:8]
        table.add_row(c.clean(row["engine"]), *numbers, Text(state, "dim"), _how(row))
    c.out().print(table)


def _how(row: dict[str, Any]) -> Text:
    if "error" in row:
        return Text(c.clean(row["error"].removeprefix(f"{row['engine']}")).strip(": "), "red")
    how = Text("ready", "green") if row["ready"] else Text(c.clean(row["reason"]), "yellow")
    for said in dict.fromkeys((row["trouble"], row["doubt"])):
        if said and said != row["reason"]:
            how.append(f"  {c.clean(said)}", "red")
    return how


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
