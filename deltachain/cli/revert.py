"""``deltachain revert``: bring every replica back to an older version, durably."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltachain.cli import console as c
from deltachain.cli.options import AsJson, AtStep, Base, Encode, TagName, Url, choice_of
from deltachain.errors import ConfigError

if TYPE_CHECKING:
    from deltachain.chain.chain import Chain
    from deltachain.publish.revert import Reverted


def revert(  # noqa: PLR0913 - one argument an option
    url: Url,
    *,
    version: Annotated[
        int | None, typer.Option("--version", "--to", min=0, metavar="N", help="The older version.")
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
    """Commit a version with the state of an older one: every replica goes back.

    Followers apply it, a delta from the head, like any other. Both states are proven before the
    commit. A publisher at work is fenced; a later one refuses other weights, unless told to
    continue.

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
    report = _report(chain, done, time.perf_counter() - start)
    c.show(report, _show, as_json=as_json)


def _report(chain: "Chain", done: "Reverted", seconds: float) -> dict[str, Any]:
    edge, committed, before = done.edge, done.committed, done.before.manifest
    return {
        "url": chain.store.url,
        "chain": chain.identity.chain,
        "to": done.goal.version,
        "from": before.version,
        "version": None if committed is None else committed.version,
        "epoch": None if committed is None else committed.manifest.epoch,
        "state": str(done.goal.state),
        "changed": edge is not None,
        "tensors": done.tensors,
        "nnz": done.nnz,
        "density": done.nnz / before.numel if before.numel else 0.0,
        "nbytes": 0 if edge is None else edge.nbytes,
        "parts": 0 if edge is None else len(edge.parts),
        "seconds": round(seconds, 3),
    }


def _show(report: dict[str, Any]) -> None:
    was, to = f"version {report['from']}", f"version {report['to']}"
    size = (
        f"{c.nbytes(report['nbytes'])}  {c.count(report['nnz'])} elements in "
        f"{report['tensors']:,} tensors, {c.percent(report['density'])}"
    )
    if not report["changed"]:
        c.out().print(f"nothing to do: {was}, the head, has the state of {to}", soft_wrap=True)
    elif report["version"] is None:
        said = f"from {was} back to {to}: {size}; nothing was written"
        c.out().print(said, soft_wrap=True)
    else:
        c.done(f"version {report['version']} has the state of {to}  {size}", report["state"])
