"""``deltachain tag``: list, set and remove names of versions."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from deltachain.cli import console as c
from deltachain.cli.options import AsJson, At, AtStep, AtVersion, Url, choice_of, opened
from deltachain.errors import ConfigError

if TYPE_CHECKING:
    from deltachain.chain.chain import Chain
    from deltachain.chain.tags import VersionChoice


def tag(  # noqa: PLR0913 - one argument an option
    url: Url,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The tag to set or delete. Default: list all.")
    ] = "",
    *,
    version: AtVersion = None,
    step: AtStep = None,
    at: At = "",
    delete: Annotated[bool, typer.Option("--delete", help="Remove the tag.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the tags of a chain, or set, move or remove one.

    Its version must be rebuildable from the store.

    Example: `deltachain tag /mnt/policy`

    Example: `deltachain tag /mnt/policy eval-step-4000 --step 4000`
    """
    from deltachain.chain.tags import VersionChoice

    choice = choice_of(version, step=step, at=at)
    if not name and (delete or choice != VersionChoice()):
        raise ConfigError("a tag needs a name", hint="deltachain tag URL NAME")
    if delete and choice != VersionChoice():
        hint = "deltachain tag URL NAME --delete"
        raise ConfigError("--delete removes a tag, whatever version it stands for", hint=hint)
    chain = opened(url, writing=bool(name))
    if name:
        _change(chain, name, choice, delete=delete, as_json=as_json)
    else:
        _list(chain, as_json=as_json)


def _change(
    chain: "Chain", name: str, choice: "VersionChoice", *, delete: bool, as_json: bool
) -> None:
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
    if after is None:
        c.done(f"{name} is removed; it was version {record.version}")
    else:
        moved = before is not None and before.version != after.version
        was = f"; it was version {before.version}" if before and moved else ""
        c.done(f"{name} is version {after.version}{was}", after.state)


def _list(chain: "Chain", *, as_json: bool) -> None:
    from deltachain.chain import heartbeat, tags

    found = tags.read_all(chain)
    if found:
        heartbeat.warn_of_unproven(chain, heartbeat.named(chain), "these records are")
    if as_json:
        names = ("name", "version", "state", "manifest", "time", "number")
        rows = [c.fields(one, *names) for one in found]
        c.write_json({"url": chain.store.url, "chain": chain.identity.chain, "tags": rows})
    elif found:
        cells = ((t.name, str(t.version), c.moment(t.time), t.state[:8]) for t in found)
        c.out().print(c.table(("~tag", ">version", "set", "state"), cells))
    else:
        c.out().print("no tag is set", style="dim")
