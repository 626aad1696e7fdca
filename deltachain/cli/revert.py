"""``deltachain revert``: bring every replica back to an older version, durably."""

# ruff: noqa: PLC0415 - dependencies are imported when the command runs
from __future__ import annotations

import time
from typing import Annotated

import typer

from deltachain.cli import console as c
from deltachain.cli.options import AsJson, AtStep, Base, Encode, TagName, Url, choice_of
from deltachain.errors import ConfigError


def revert(  # noqa: PLR0913 - one argument an option
    url: Url,
    *,
    version: Annotated[
        int | None,
        typer.Option("--version", "--to", min=0, metavar="N", help="The older version."),
    ] = None,
    step: AtStep = None,
    tag: TagName = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Compute bytes and elements, and write nothing.")
    ] = False,
    encoding: Encode = "step",
    base: Base = None,
    as_json: AsJson = False,
) -> None:
    """Commit a version that has the state of an older one: every replica goes back.

    The new version is a delta from the head, so followers apply it like any other, also after a
    restart. Both states are proven before the commit. A publisher at work is fenced; one that
    starts later refuses other weights, unless it is told to continue.

    Example: `deltachain revert /mnt/policy --version 40 --dry-run`

    Example: `deltachain revert /mnt/policy --tag eval-step-4000`
    """
    from deltachain.chain.chain import Chain
    from deltachain.chain.tags import VersionChoice, choose
    from deltachain.chain.trust import Trust
    from deltachain.cli.progress import watching
    from deltachain.publish.revert import revert as go_back
    from deltachain.store import open_store

    start, choice = time.perf_counter(), choice_of(version, step=step, tag=tag)
    if choice == VersionChoice():
        raise ConfigError("which version?", hint="give --version, --step or --tag")
    with watching(open_store(url, writer=True), "rebuilding two versions") as store:
        chain = Chain.open(store, Trust.of_writer())
        goal = choose(chain, choice)
        done = go_back(chain, goal, encoding=encoding, base=base, dry_run=dry_run)
    edge, committed, before = done.edge, done.committed, done.before.manifest
    nbytes, density = 0 if edge is None else edge.nbytes, done.nnz / max(1, before.numel)
    if as_json:
        c.write_json(
            {
                "url": chain.store.url,
                "chain": chain.identity.chain,
                "to": goal.version,
                "from": before.version,
                "version": None if committed is None else committed.version,
                "epoch": None if committed is None else committed.manifest.epoch,
                "state": str(goal.state),
                "changed": edge is not None,
                "tensors": done.tensors,
                "nnz": done.nnz,
                "density": density,
                "nbytes": nbytes,
                "parts": 0 if edge is None else len(edge.parts),
                "seconds": round(time.perf_counter() - start, 3),
            }
        )
        return
    size = (
        f"{c.nbytes(nbytes)}  {c.count(done.nnz)} elements in {done.tensors:,} tensors, "
        f"{c.percent(density)}"
    )
    if edge is None:
        said = f"nothing to do: version {before.version}, the head, has the state of version "
        said += f"{goal.version}"
    elif committed is None:
        said = f"from version {before.version} back to version {goal.version}: {size}; nothing was "
        said += "written"
    else:
        said = f"[bold green]✓[/]  version {committed.version} has the state of version "
        said += f"{goal.version}  {size}  [dim]{str(goal.state)[:8]}[/]"
    c.out().print(said, markup=True, soft_wrap=True)
