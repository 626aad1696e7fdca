"""``deltachain tag``: list, set and remove names of versions."""

# ruff: noqa: PLC0415 - dependencies are imported when the command runs
from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltachain.cli import console as c
from deltachain.cli.options import AsJson, At, AtStep, Url, choice_of
from deltachain.errors import ConfigError

if TYPE_CHECKING:
    from deltachain.chain.chain import Chain
    from deltachain.chain.tags import VersionChoice
    from deltachain.format.documents import Tag


def tag(  # noqa: PLR0913 - one argument an option
    url: Url,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The tag to set or delete. Default: list all.")
    ] = "",
    *,
    version: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="The version. Default: the head.")
    ] = None,
    step: AtStep = None,
    at: At = "",
    delete: Annotated[bool, typer.Option("--delete", help="Remove the tag.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the tags of a chain, or set or remove one.

    A tag is a name of a version that `--tag` of other commands takes. Set again, it moves. It is
    set only if its version can be rebuilt from the store.

    Example: `deltachain tag /mnt/policy`

    Example: `deltachain tag /mnt/policy eval-step-4000 --step 4000`
    """
    from deltachain.chain.chain import Chain
    from deltachain.chain.tags import VersionChoice
    from deltachain.chain.trust import Trust
    from deltachain.store import open_store

    choice = choice_of(version, step=step, at=at)
    if not name and (delete or choice != VersionChoice()):
        raise ConfigError("a tag needs a name", hint="deltachain tag URL NAME")
    if delete and choice != VersionChoice():
        hint = "deltachain tag URL NAME --delete"
        raise ConfigError("--delete removes a tag, whatever version it stands for", hint=hint)
    chain = Chain.open(open_store(url), Trust.of_writer() if name else None)
    if name:
        _change(chain, name, choice, delete=delete, as_json=as_json)
    else:
        _list(chain, as_json=as_json)


def _change(chain: Chain, name: str, choice: VersionChoice, *, delete: bool, as_json: bool) -> None:
    """Set or remove a tag."""
    from deltachain.chain import tags
    from deltachain.chain.tags import choose

    before = tags.shown(chain, name)
    if delete:
        after, record = None, tags.remove(chain, name, time=time.time())
    else:
        after = record = tags.set_(chain, name, choose(chain, choice), time=time.time())
    if as_json:
        report = {"url": chain.store.url, "chain": chain.identity.chain, "name": name}
        old = None if before is None else before.version
        new = None if after is None else after.version
        c.write_json(report | {"version": new, "before": old, "state": after and after.state})
        return
    out = c.out()
    if after is None:
        out.print(
            f"[bold green]✓[/]  {name} is removed; it was version {record.version}",
            markup=True,
            soft_wrap=True,
        )
        return
    moved = before is not None and before.version != after.version
    was = f"; it was version {before.version}" if before and moved else ""
    out.print(
        f"[bold green]✓[/]  {name} is version {after.version}{was}  [dim]{after.state[:8]}[/]",
        markup=True,
        soft_wrap=True,
    )


def _list(chain: Chain, *, as_json: bool) -> None:
    from deltachain.chain import heartbeat, tags

    found = tags.read_all(chain)
    if found:
        heartbeat.warn_of_unproven(chain, heartbeat.named(chain), "these records are")
    if as_json:
        rows = [_row(one) for one in found]
        c.write_json({"url": chain.store.url, "chain": chain.identity.chain, "tags": rows})
    else:
        _show(found)


def _row(one: Tag) -> dict[str, Any]:
    return {
        "name": one.name,
        "version": one.version,
        "state": one.state,
        "manifest": one.manifest,
        "time": one.time,
        "number": one.number,
    }


def _show(found: Sequence[Tag]) -> None:
    if not found:
        c.out().print("no tag is set", style="dim")
        return
    grid = c.table("~tag", ">version", "set", "state")
    for one in found:
        grid.add_row(one.name, str(one.version), c.moment(one.time), one.state[:8])
    c.out().print(grid)
