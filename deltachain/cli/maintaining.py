"""``deltachain maintain``, ``prune`` and ``anchor``: add skips and anchors, retire old edges."""

# ruff: noqa: PLC0415 - dependencies are imported when the command runs
from __future__ import annotations

import re
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from deltachain.cli import console as c
from deltachain.cli.options import AsJson, AsJsonLines, Base, Once, Url
from deltachain.cli.stopping import end, stopping
from deltachain.errors import (
    BrokenChainError,
    ChainError,
    ConfigError,
    DeltaChainError,
    ObjectNotFoundError,
    no_version,
)

if TYPE_CHECKING:
    from deltachain.chain.chain import Chain
    from deltachain.format.documents import EdgeSummary
    from deltachain.maintain import KeepRule, Maintained, Maintainer, PrunePlan
    from deltachain.maintain.survey import Survey

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
"""Seconds of a unit of time on the command line."""


def seconds(text: str) -> float:
    """Parse a span of time such as ``90s``, ``30m``, ``12h`` or ``7d``.

    Raises:
        ConfigError: The text is none.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([smhdw]?)", text.strip())
    if found is None:
        raise ConfigError(f"{text!r} is not a span of time", hint="write 90s, 30m, 12h, 7d or 2w")
    return float(found[1]) * UNITS[found[2] or "s"]


KeepLast: TypeAlias = Annotated[
    int,
    typer.Option(min=1, metavar="N", help="Keep the N newest versions, and every way among them."),
]
KeepWithin: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="SPAN", help="Keep versions committed within this time of the head: 7d."),
]
KeepEvery: TypeAlias = Annotated[
    int | None, typer.Option(min=1, metavar="K", help="Keep each version that K divides.")
]
KeepTags: TypeAlias = Annotated[
    bool, typer.Option("--keep-tags/--no-keep-tags", help="Keep every tagged version.")
]
Grace: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="SPAN",
        help="Time from the record of a prune to the deletion, by the clock of the store.",
    ),
]


def maintain(  # noqa: PLR0913 - one argument an option
    url: Url,
    *,
    every: Annotated[
        str, typer.Option(metavar="SPAN", help="Time from one round to the next.")
    ] = "60s",
    once: Once = False,
    delete: Annotated[
        bool, typer.Option("--prune/--no-prune", help="Whether to delete what the rule drops.")
    ] = True,
    keep_last: KeepLast = 1024,
    keep_within: KeepWithin = None,
    keep_every: KeepEvery = None,
    keep_tags: KeepTags = True,
    grace: Grace = "1h",
    base: Base = None,
    as_json: AsJsonLines = False,
) -> None:
    """Keep a chain cheap to join and bounded in size, until Ctrl-C.

    Each round folds deltas into skips over 8, 64 and 512 versions, adds an anchor if joining has
    become expensive, and prunes: a record names the edges that are no longer used, and their
    objects are deleted when the grace is over. Runs anywhere, beside publishers, followers and
    other maintainers. It waits for a chain that nobody has made yet, needs the right to write, and
    no torch. With `--once` it fails if newcomers still cannot join.

    Example: `deltachain maintain s3://bucket/run-1 --every 5m --keep-last 500`
    """
    rule = _rule(keep_last, keep_within, keep_every, tags=keep_tags)
    stop, pause, grace_s = Event(), seconds(every), seconds(grace)
    maintainer: Maintainer | None = None
    with stopping(stop) as by:
        while not stop.is_set():
            try:
                maintainer = maintainer or _maintainer(
                    _open(url), rule, grace_s, base, delete=delete
                )
                found = maintainer.round()
            except DeltaChainError as error:
                if once or not _may_pass(error, is_open=maintainer is not None):
                    raise
                c.say_error(error)  # the next round tries again
            else:
                if found is not None:
                    _tell(found, as_json=as_json, once=once)
                if once:
                    _check_joinable(found, url)
            if once or stop.wait(pause):
                break
    end(by)


def prune(  # noqa: PLR0913 - one argument an option
    url: Url,
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be deleted; write and delete nothing.")
    ] = False,
    keep_last: KeepLast = 1024,
    keep_within: KeepWithin = None,
    keep_every: KeepEvery = None,
    keep_tags: KeepTags = True,
    grace: Grace = "1h",
    as_json: AsJson = False,
) -> None:
    """Retire what a rule does not keep, and delete what was retired before the grace.

    Manifests are never deleted. Every kept version stays reachable from nothing, which is proven
    before anything is deleted. Run it again after the grace to delete what this run retires.

    Example: `deltachain prune /mnt/policy --keep-last 200 --keep-every 1000 --dry-run`
    """
    chain = _open(url)
    rule = _rule(keep_last, keep_within, keep_every, tags=keep_tags)
    pruner = _pruner(chain, rule, seconds(grace))
    found = pruner.plan(dry=True) if dry_run else pruner.run()
    if found is None:
        raise no_version(url)
    report = _pruned(found) | {"url": chain.store.url, "dry_run": dry_run}
    if as_json:
        c.write_json(report)
    else:
        _show_prune(report)


def anchor(
    url: Url,
    *,
    version: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="The version. Default: the head.")
    ] = None,
    base: Base = None,
    as_json: AsJson = False,
) -> None:
    """Add an anchor of a version, so that newcomers start there.

    The version is rebuilt from the store and proven before it is recorded.

    Example: `deltachain anchor /mnt/policy`
    """
    from deltachain.maintain.added_edges import add_anchor

    chain = _open(url)
    head = chain.head()
    if head is None:
        raise no_version(url)
    target = head if version is None else chain.find(version)
    if target is None:
        message = f"version {version} is not committed, head is {head.version}"
        raise ChainError(message, hint="`deltachain log URL` lists the versions")
    summary = add_anchor(chain, target, base=base)
    _maintainer(chain, None, 0.0, base, delete=False).hint(head)
    report = {"url": chain.store.url, **_edge(summary)}
    if as_json:
        c.write_json(report)
    else:
        c.out().print(
            f"[bold green]✓[/]  anchor of version {summary.version}  {c.nbytes(summary.nbytes)} "
            f"in {summary.parts} {'part' if summary.parts == 1 else 'parts'}",
            markup=True,
        )


def dry_prune(
    survey: Survey, last: int, within: str | None, every: int | None
) -> dict[str, Any] | None:
    """Return what pruning would do; ``None`` if newcomers have no way, so that it is refused."""
    from deltachain.maintain import Pruner

    try:
        plan = Pruner(survey, _rule(last, within, every, tags=True)).plan(dry=True)
    except BrokenChainError:
        return None
    return None if plan is None else _pruned(plan)


def _open(url: str) -> Chain:
    from deltachain.chain.chain import Chain
    from deltachain.chain.trust import Trust
    from deltachain.store import open_store

    return Chain.open(open_store(url, writer=True), Trust.of_writer())


def _rule(last: int, within: str | None, every: int | None, *, tags: bool) -> KeepRule:
    from deltachain.maintain import KeepRule

    within_s = None if within is None else seconds(within)
    return KeepRule(last=last, within_s=within_s, every=every, tags=tags)


def _pruner(chain: Chain, rule: KeepRule, grace_s: float) -> Any:  # noqa: ANN401
    from deltachain.maintain import Pruner
    from deltachain.maintain.survey import Survey

    return Pruner(Survey(chain), rule, grace_s=grace_s)


def _may_pass(error: DeltaChainError, *, is_open: bool) -> bool:
    """Return whether a later round may succeed: a chain may not be made yet."""
    return error.retryable or (not is_open and isinstance(error, ObjectNotFoundError))


def _maintainer(
    chain: Chain,
    rule: KeepRule | None,
    grace_s: float,
    base: Path | None,
    *,
    delete: bool,
) -> Maintainer:
    from deltachain.maintain import Maintainer

    pruner = _pruner(chain, rule, grace_s) if delete and rule else None
    return Maintainer(chain, pruner, base=base)


def _tell(found: Maintained, *, as_json: bool, once: bool) -> None:
    """Print what a round did; nothing for one of many rounds without work.

    Args:
        found: The round.
        as_json: Whether to print a JSON object.
        once: Whether it was the only round: that newcomers cannot join then ends the command.
    """
    if as_json:
        c.write_json(
            {
                "head": found.head,
                "skips": [_edge(edge) for edge in found.skips],
                "anchors": [_edge(edge) for edge in found.anchors],
                "failed": list(found.failed),
                "pruned": None if found.pruned is None else _pruned(found.pruned),
            }
        )
        return
    words = []
    if found.skips:
        size = c.nbytes(sum(edge.nbytes for edge in found.skips))
        words.append(f"skips added: {len(found.skips):,}, {size}")
    words += [f"anchor of version {e.version} added, {c.nbytes(e.nbytes)}" for e in found.anchors]
    pruned = found.pruned
    if pruned is not None and (pruned.retired or pruned.due or pruned.orphans):
        words += _prune_words(_pruned(pruned))
    if words:
        c.out().print(f"version {found.head:>5}  " + "; ".join(words), soft_wrap=True)
    elif once and not found.failed:
        c.say(f"nothing to do up to version {found.head}")
    is_first_said = once and found.no_way is not None
    for failure in found.failed[is_first_said:]:
        c.say(f"warning  {failure}", "yellow")


def _check_joinable(found: Maintained | None, url: str) -> None:
    """Check that newcomers can join after a single round.

    Raises:
        ChainError: The chain has no version.
        DeltaChainError: They cannot, as the round found.
    """
    if found is None:
        raise no_version(url)
    if found.no_way is not None:
        raise found.no_way


def _edge(edge: EdgeSummary) -> dict[str, Any]:
    return {
        "kind": edge.kind,
        "version": edge.version,
        "base": edge.base,
        "nbytes": edge.nbytes,
        "parts": edge.parts,
    }


def _pruned(plan: PrunePlan) -> dict[str, Any]:
    return {
        "head": plan.head,
        "retired": len(plan.retired),
        "deleted": {
            "objects": len(plan.due) + len(plan.orphans),
            "orphans": len(plan.orphans),
            "nbytes": plan.nbytes,
        },
        "waiting": {
            "objects": len(plan.waiting),
            "nbytes": plan.waiting_nbytes,
            "until": max(plan.after.values(), default=None) if plan.waiting else None,
        },
    }


def _prune_words(report: dict[str, Any]) -> list[str]:
    deleted, waiting = report["deleted"], report["waiting"]
    words = [f"{c.plural(report['retired'], 'edge')} retired"]
    words.append(f"{c.plural(deleted['objects'], 'object')} deleted, {c.nbytes(deleted['nbytes'])}")
    if deleted["orphans"]:
        words.append(f"{deleted['orphans']:,} of them orphans")
    if waiting["objects"]:
        words.append(f"{waiting['objects']:,} wait for the grace, {c.nbytes(waiting['nbytes'])}")
    return words


def _show_prune(report: dict[str, Any]) -> None:
    deleted, waiting = report["deleted"], report["waiting"]
    would = "would be " if report["dry_run"] else ""
    c.out().print(
        c.facts(
            head=f"version {report['head']}",
            retired=f"{c.plural(report['retired'], 'edge')} {would}retired now",
            deleted=f"{c.plural(deleted['objects'], 'object')} {would}deleted, "
            f"{c.nbytes(deleted['nbytes'])}"
            + (f", {deleted['orphans']:,} of them orphans" if deleted["orphans"] else ""),
            waiting=f"{c.plural(waiting['objects'], 'object')} to delete after the grace, "
            f"{c.nbytes(waiting['nbytes'])}",
        )
    )
