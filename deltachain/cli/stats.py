"""``deltachain stats``: size of a chain."""

# ruff: noqa: PLC0415 - dependencies are imported when the command runs
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deltachain.cli import console as c
from deltachain.cli.maintaining import KeepEvery, KeepLast, KeepWithin, dry_prune
from deltachain.cli.options import AsJson, Url
from deltachain.errors import no_version

if TYPE_CHECKING:
    from deltachain.maintain.survey import ReaderPlan


def stats(
    url: Url,
    *,
    keep_last: KeepLast = 1024,
    keep_within: KeepWithin = None,
    keep_every: KeepEvery = None,
    as_json: AsJson = False,
) -> None:
    """Show what lies in a chain's store, and what joining it takes.

    Lists every object. The last line says what `deltachain prune` would free.

    Example: `deltachain stats s3://bucket/run-1`
    """
    from deltachain.chain.chain import Chain
    from deltachain.maintain.survey import Survey, reader_plans, totals
    from deltachain.store import open_store

    chain = Chain.open(open_store(url))
    head = chain.head()
    if head is None:
        raise no_version(url)
    by_kind = {total.kind: total for total in totals(chain.store.list())}
    plans, survey = reader_plans(chain, head), Survey(chain)
    nbytes = sum(total.nbytes for total in by_kind.values())
    kinds = [{"kind": t.kind, "objects": t.objects, "nbytes": t.nbytes} for t in by_kind.values()]
    report = {
        "url": chain.store.url,
        "chain": chain.identity.chain,
        "head": head.version,
        "kinds": kinds,
        "nbytes": nbytes,
        "readers": [_reader(one) for one in plans],
        "prune": dry_prune(survey, keep_last, keep_within, keep_every),
    }
    if as_json:
        c.write_json(report)
    else:
        _show(report)


def _reader(one: ReaderPlan) -> dict[str, Any]:
    plan = one.plan
    return {
        "age": one.age,
        "nbytes": None if plan is None else plan.nbytes,
        "edges": None if plan is None else len(plan.edges),
        "objects": None if plan is None else plan.requests,
    }


def _show(report: dict[str, Any]) -> None:
    out = c.out()
    out.print(c.facts(chain=f"{report['chain']}  at {report['url']}", head=f"{report['head']}"))
    kinds = c.table("objects", ">number", ">bytes", "")
    for row in report["kinds"]:
        share = row["nbytes"] / max(report["nbytes"], 1)
        kinds.add_row(row["kind"], f"{row['objects']:,}", c.nbytes(row["nbytes"]), c.bar(share))
    out.print()
    out.print(c.fitted(kinds, out.width))
    ways = c.table("reader", ">edges", ">bytes")
    for row in report["readers"]:
        who = "newcomer" if row["age"] is None else f"{row['age']:,} behind"
        if row["edges"] is None:
            ways.add_row(who, "none", "no way: restart the publisher")
        else:
            ways.add_row(who, f"{row['edges']:,}", c.nbytes(row["nbytes"]))
    out.print()
    out.print(c.fitted(ways, out.width))
    prune = report["prune"]
    if prune is None:
        out.print("\npruning would free nothing, since newcomers have no way to the head")
        return
    freed = prune["deleted"]["nbytes"] + prune["waiting"]["nbytes"]
    out.print(f"\npruning would free {c.nbytes(freed)}: deltachain prune URL --dry-run")
