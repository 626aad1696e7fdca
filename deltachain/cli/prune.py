"""``deltachain prune`` and ``anchor``: retire old edges, and add a place for newcomers to start."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from deltachain.cli import console as c
from deltachain.cli.options import AsJson, AtVersion, Base, Url, opened
from deltachain.errors import ChainError, ConfigError, no_version

if TYPE_CHECKING:
    from deltachain.chain.chain import Chain
    from deltachain.format.documents import EdgeSummary
    from deltachain.maintain import KeepRule, PrunePlan, Pruner

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}

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
        help="Time from a prune record to the deletion, by the store's clock.",
    ),
]


def prune(  # noqa: PLR0913 - one argument an option
    url: Url,
    *,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the objects to delete, and change nothing."),
    ] = False,
    keep_last: KeepLast = 1024,
    keep_within: KeepWithin = None,
    keep_every: KeepEvery = None,
    keep_tags: KeepTags = True,
    grace: Grace = "1h",
    as_json: AsJson = False,
) -> None:
    """Retire edges outside a rule, and delete edges retired before the grace.

    Manifests stay. Before a deletion every kept version is proven reachable from nothing. Run it
    again after the grace.

    Example: `deltachain prune /mnt/policy --keep-last 200 --keep-every 1000 --dry-run`
    """
    chain = opened(url, writing=True)
    rule = rule_of(keep_last, keep_within, keep_every, tags=keep_tags)
    pruner = pruner_of(chain, rule, seconds(grace))
    plan = pruner.plan(dry=True) if dry_run else pruner.run()
    if plan is None:
        raise no_version(url)
    report = pruned(plan) | {"url": chain.store.url, "dry_run": dry_run}
    if as_json:
        c.write_json(report)
        return
    would = "would be " if dry_run else ""
    deleted, waiting = words_of(report)[1:]
    c.out().print(
        c.facts(
            head=f"version {report['head']}",
            retired=f"{c.plural(report['retired'], 'edge')} {would}retired now",
            deleted=deleted.replace(" deleted", f" {would}deleted", 1),
            waiting=waiting,
        )
    )


def anchor(
    url: Url,
    *,
    version: AtVersion = None,
    base: Base = None,
    as_json: AsJson = False,
) -> None:
    """Add an anchor of a version, a start for newcomers.

    The version is rebuilt from the store and proven first.

    Example: `deltachain anchor /mnt/policy`
    """
    from deltachain.maintain import Maintainer
    from deltachain.maintain.added_edges import add_anchor

    chain = opened(url, writing=True)
    head = chain.head()
    if head is None:
        raise no_version(url)
    target = head if version is None else chain.find(version)
    if target is None:
        message = f"version {version} is not committed, head is {head.version}"
        raise ChainError(message, hint="`deltachain log URL` lists the versions")
    summary = add_anchor(chain, target, base=base)
    Maintainer(chain, None, base=base).hint(head)
    if as_json:
        c.write_json({"url": chain.store.url, **edge_row(summary)})
    else:
        size = f"{c.nbytes(summary.nbytes)} in {c.plural(summary.parts, 'part')}"
        c.done(f"anchor of version {summary.version}  {size}")


def seconds(text: str) -> float:
    span = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([smhdw]?)", text.strip())
    if span is None:
        raise ConfigError(f"{text!r} is not a span of time", hint="write 90s, 30m, 12h, 7d or 2w")
    return float(span[1]) * UNITS[span[2] or "s"]


def rule_of(last: int, within: str | None, every: int | None, *, tags: bool = True) -> KeepRule:
    from deltachain.maintain import KeepRule

    within_s = None if within is None else seconds(within)
    return KeepRule(last=last, within_s=within_s, every=every, tags=tags)


def pruner_of(chain: Chain, rule: KeepRule, grace_s: float) -> Pruner:
    from deltachain.maintain import Pruner
    from deltachain.maintain.survey import Survey

    return Pruner(Survey(chain), rule, grace_s=grace_s)


def edge_row(edge: EdgeSummary) -> dict[str, Any]:
    return c.fields(edge, "kind", "version", "base", "nbytes", "parts")


def pruned(plan: PrunePlan) -> dict[str, Any]:
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
            "nbytes": sum(info.nbytes for info in plan.waiting),
            "until": max(plan.after.values(), default=None) if plan.waiting else None,
        },
    }


def words_of(report: dict[str, Any]) -> tuple[str, str, str]:
    deleted, waiting = report["deleted"], report["waiting"]
    orphans = f", {deleted['orphans']:,} of them orphans" if deleted["orphans"] else ""
    return (
        f"{c.plural(report['retired'], 'edge')} retired",
        f"{c.plural(deleted['objects'], 'object')} deleted, {c.nbytes(deleted['nbytes'])}{orphans}",
        f"{c.plural(waiting['objects'], 'object')} to delete after the grace, "
        f"{c.nbytes(waiting['nbytes'])}",
    )
